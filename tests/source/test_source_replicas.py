"""Gradient accumulation in a loop whose model exchanges gradients with replicas."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

from slipstream.source import EditLocationError, Source, accumulate, locate

SCRIPT = """\
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

torch.manual_seed(0)
net = nn.Linear(4, 2)
model = DDP(net)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
batches = torch.randn(8, 3, 4)
for x in batches:
    output = model(x)
    loss = output.square().mean()  # what the loop is about
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def edited(text: str, batches: int = 4) -> Source:
    return accumulate(locate(Source.of(text.encode(), Path("train.py")), None), batches)


@pytest.fixture
def one_rank() -> Iterator[None]:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def exchanges(text: str) -> tuple[int, Any]:
    """Return how often the script's replicas exchange gradients, and the trained weight."""
    found: dict[str, Any] = {}
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profiler:
        exec(compile(text, "train.py", "exec"), found)
    names = [event.name for event in profiler.events()]
    return names.count("c10d::allreduce_"), found["net"].weight.detach()


def test_gradients_are_exchanged_once_per_update(one_rank: None) -> None:
    plain = SCRIPT.replace("DDP(net)", "net")
    assert exchanges(SCRIPT)[0] == 8
    assert exchanges(edited(SCRIPT).text)[0] == 2
    _, ours = exchanges(edited(SCRIPT).text)
    _, theirs = exchanges(edited(plain).text)
    torch.testing.assert_close(ours, theirs)


def test_only_forward_and_backward_are_inside_the_block() -> None:
    text = edited(SCRIPT.replace("import torch\n", "import contextlib\nimport torch\n", 1)).text
    assert text.count("import contextlib") == 1
    assert (
        "    with model.no_sync() if (step + 1) % 4 else contextlib.nullcontext():\n"
        "        output = model(x)\n"
        "        loss = output.square().mean()  # what the loop is about\n"
        "        if step % 4 == 0:\n"
        "            optimizer.zero_grad()\n"
        "        (loss / 4).backward()\n"
        "    if (step + 1) % 4 == 0:\n"
        "        optimizer.step()\n"
    ) in text


def test_the_wrapper_is_found_if_the_optimizer_trains_its_module() -> None:
    text = edited(SCRIPT.replace("model.parameters", "net.parameters")).text
    assert "with model.no_sync()" in text


@pytest.mark.parametrize(
    ("old", "new", "message", "line"),
    [
        ("model = DDP(net)", "model = net\nif len('a'):\n    model = DDP(net)", "condition", 8),
        ("model = DDP(net)", "model = DDP(net) if net else net", "condition", 7),
        ("output = model(x)", "output = forward(x)", "which call", 7),
        ("net = nn.Linear(4, 2)", "net = DDP(nn.Linear(4, 2))", "which call", 6),
        ("import torch\n", "import torch\ncontextlib = 3\n", "'contextlib'", 11),
    ],
)
def test_uncertain_code_is_refused(old: str, new: str, message: str, line: int) -> None:
    with pytest.raises(EditLocationError, match=message) as error:
        edited(SCRIPT.replace(old, new, 1)).reparse()
    assert str(error.value.where) == f"train.py:{line}"


def test_without_replicas_there_is_no_such_block() -> None:
    text = edited(SCRIPT.replace("DDP(net)", "net")).text
    assert "no_sync" not in text
    assert "contextlib" not in text
