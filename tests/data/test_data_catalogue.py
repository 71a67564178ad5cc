"""The catalogue and `get`: every name has a loader, every mistake a helpful error."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

from slipstream import data
from slipstream.data import kinds
from slipstream.errors import InvalidArgumentError, MissingExtraError, UnknownNameError

ENTRIES = data.manifest()
IN_FOLDER = [entry.name for entry in ENTRIES if entry.folder]


def test_names_are_unique() -> None:
    assert len({entry.name for entry in ENTRIES}) == len(ENTRIES)


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_every_entry_names_a_loader_and_a_kind(entry: data.Entry) -> None:
    module, function = entry.loader.split(":")
    load = getattr(importlib.import_module(f"slipstream.data.{module}"), function)
    assert next(iter(inspect.signature(load).parameters)) == "entry"
    assert issubclass(getattr(kinds, entry.kind), kinds.Dataset)
    assert entry.licence
    assert entry.source


def test_importing_the_package_loads_neither_torch_nor_scikit_learn() -> None:
    check = (
        "import sys, slipstream.data; "
        "sys.exit(bool({'torch', 'sklearn', 'PIL', 'scipy'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


def test_an_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="fashion_mnist"):
        data.get("fashion-mnist")


def test_an_unknown_option_lists_the_known_ones() -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        data.get("stdlib_source", limit=3)
    assert "limit_bytes" in str(caught.value)


@pytest.mark.parametrize("name", IN_FOLDER)
def test_an_absent_set_explains_what_to_do(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("slipstream.data._find.DEBIAN", tmp_path / "debian")
    monkeypatch.delenv("SLIPSTREAM_DATA", raising=False)
    options = {"decode": False} if name in ("cifar10_jpeg", "imagenet_sample") else {}
    with pytest.raises(data.MissingDataError) as caught:
        data.get(name, **options)
    command = "apt-get install dataset-fashion-mnist"
    assert (command if name == "fashion_mnist" else "set SLIPSTREAM_DATA") in str(caught.value)
    assert name not in data.available()

    # An empty folder is a different mistake from a missing one.
    monkeypatch.setenv("SLIPSTREAM_DATA", str(tmp_path))
    with pytest.raises(data.MissingDataError) as caught:
        data.get(name, **options)
    assert str(tmp_path) in str(caught.value)


def test_a_missing_package_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    # None in sys.modules makes an import fail, whether or not the package is installed.
    monkeypatch.setitem(sys.modules, "sklearn", None)
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(MissingExtraError, match="scikit-learn") as caught:
        data.get("digits")
    assert "slipstream[data]" in str(caught.value)
    monkeypatch.setitem(sys.modules, "PIL", None)
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(MissingExtraError, match="Pillow") as caught:
        data.get("cifar10_jpeg")
    assert "slipstream[vision]" in str(caught.value)


def test_available_sets_can_be_listed_without_loading() -> None:
    here = data.available()
    assert {"python_topics", "stdlib_source"} <= set(here)
    assert here == [entry.name for entry in ENTRIES if entry.name in here]


def test_the_package_includes_no_data() -> None:
    package = Path(str(data.__file__)).parent
    kinds_of_file = {path.suffix for path in package.rglob("*") if path.is_file()}
    assert kinds_of_file <= {".py", ".pyc"}
