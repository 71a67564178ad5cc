"""A file with relative imports runs as a module of its package."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest

from slipstream.techniques.accumulation import Accumulation
from slipstream.workload.packages import import_place

_TRAIN = """
import pickle
import torch
from .net import Net
from ..settings import RATE
class Sample(tuple): pass
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
pickle.loads(pickle.dumps(Sample()))
for _ in range(50):
    optimizer.zero_grad()
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
def make():
    return model, torch.ones(2, 3), torch.sum, optimizer
"""
_NET = "import torch\nclass Net(torch.nn.Linear):\n    def __init__(self): super().__init__(3, 3)\n"


def look(built: Any) -> Generator[None, Any, list[Any]]:
    for _ in range(2):
        yield
    main = sys.modules["__main__"]
    return [type(built.model).__module__, built.samples, main.__spec__ and main.__spec__.name]


@pytest.fixture
def package(tmp_path: Path) -> Path:
    inner = tmp_path / "user" / "outer" / "inner"
    inner.mkdir(parents=True)
    for folder in (inner, inner.parent):
        (folder / "__init__.py").touch()
    (inner / "net.py").write_text(_NET)
    (inner.parent / "settings.py").write_text("RATE = 0.1\n")
    return inner


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize("techniques", [(), (Accumulation(2),)])
def test_a_script_in_a_package(
    drive_forked: Callable[..., Any], techniques: tuple[Any, ...]
) -> None:
    found = drive_forked(_TRAIN, look, name="outer/inner/train.py", techniques=techniques)
    assert found.result is not None, found.what
    assert found.result[::2] == ["outer.inner.net", "outer.inner.train"]


@pytest.mark.usefixtures("package")
def test_a_function_in_a_package(drive_forked: Callable[..., Any]) -> None:
    found = drive_forked(_TRAIN, look, name="outer/inner/train.py", function="make")
    assert found.result is not None, found.what
    assert found.result[:2] == ["outer.inner.net", 2]


_FALLBACK = """
try:
    from . import net
except ImportError:
    import net
"""


@pytest.mark.parametrize("function", [None, "make"])
def test_a_file_that_also_runs_outside_its_package(
    drive_forked: Callable[..., Any], package: Path, function: str | None
) -> None:
    (package / "net.py").write_text("import sibling\n" + _NET)
    (package / "sibling.py").touch()
    text = _FALLBACK + _TRAIN.replace("from .net import Net", "Net = net.Net").replace(
        "from ..settings import RATE", "RATE = 0.1"
    )
    found = drive_forked(text, look, name="outer/inner/train.py", function=function)
    assert found.result is not None, found.what


def test_the_folder_follows_packages_and_levels(package: Path) -> None:
    train = package / "train.py"
    train.write_text("import net\n")
    assert import_place(train) == (package, "")
    train.write_text("from . import net\n")
    assert import_place(train) == (package.parents[1], "outer.inner")
    for folder in (package, package.parent):
        (folder / "__init__.py").unlink()
    assert import_place(train) == (package.parent, "inner")
    train.write_text("from ..settings import RATE\n")
    assert import_place(train) == (package.parents[1], "outer.inner")
    train.write_text("from .................. import x\n")
    assert import_place(train)[0] == Path(train.anchor)
    train.write_text("from . import (\n")
    assert import_place(train) == (package, "")
