"""Files of three providers run unchanged; an invalid provider is reported with its line."""

from __future__ import annotations

from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest

from slipstream.workload import BuiltWorkload, Workload

Run = Callable[..., Any]

# As in the tutorials of both profilers, except for the size of the model.
SKYLINE = """\
import torch

class Wrapped(torch.nn.Module):
    def __init__(self, net, loss):
        super().__init__()
        self.net, self.loss = net, loss
    def forward(self, inputs, targets):
        return self.loss(self.net(inputs), targets)

def skyline_model_provider():
    return Wrapped(torch.nn.Linear(6, 3), torch.nn.CrossEntropyLoss())

def skyline_input_provider(batch_size=5):
    return torch.randn(batch_size, 6), torch.randint(0, 3, (batch_size,))

def skyline_iteration_provider(model):
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    def iteration(*inputs):
        optimizer.zero_grad()
        out = model(*inputs)
        out.backward()
        optimizer.step()
    return iteration
"""


def look(built: BuiltWorkload) -> Generator[None, Any, dict[str, Any]]:
    """Return the built workload's parts, and whether steps train."""
    before = [p.detach().clone() for p in built.model.parameters()]
    yield
    yield
    after = list(built.model.parameters())
    built.resize(2 * built.samples)
    yield
    return {
        "samples": built.samples,
        "trained": any((a != b).any().item() for a, b in zip(before, after, strict=True)),
        "optimizer": type(built.optimizer).__name__,
        "own": built.own_step,
        "inputs": [list(tensor.shape) for tensor in built.batch],
    }


@pytest.mark.parametrize("family", ["skyline", "deepview"])
def test_a_file_of_providers_runs_unchanged(drive_forked: Run, family: str) -> None:
    source = SKYLINE.replace("skyline", family)
    outcome = drive_forked(source, look, function=f"{family}_model_provider")
    assert outcome.result == {
        "samples": 10, "trained": True, "optimizer": "Adam", "own": True,
        "inputs": [[10, 6], [10]],
    }  # fmt: skip


def test_the_batch_size_is_passed_to_the_input_provider(drive_forked: Run) -> None:
    outcome = drive_forked(
        SKYLINE, look, function="skyline_model_provider", arguments={"batch_size": 7}
    )
    assert outcome.result["samples"] == 14


def test_the_file_name_alone_is_enough(tmp_path: Path) -> None:
    path = tmp_path / "entry.py"
    path.write_text(SKYLINE)
    assert Workload.parse(path, batch_size=3) == Workload(
        f"{path}:skyline_model_provider", {"batch_size": 3}
    )


@pytest.mark.parametrize(
    ("old", "new", "line", "says"),
    [
        ("(batch_size=5)", "(batch_size)", 13, "default of batch_size"),
        ("(batch_size=5)", "(batch_size=5.0)", 13, "is 5.0"),
        ("(batch_size=5)", "(batch_size=5, width=6)", 13, "batch_size"),
        ("(batch_size=5)", "(n=5)", 13, "batch_size"),
        ("model_provider():", "model_provider(width=3):", 10, "takes no arguments"),
        ("provider(model):", "provider(model, lr=1):", 16, "one argument"),
        ("provider(model):", "provider(*model):", 16, "one argument"),
        ("return torch.randn(batch_size, 6), ", "return torch.randn(batch_size, 6) #", 13, "bare"),
        ("return torch.randn(batch_size, 6), ", "return 3 #", 13, "returned an int"),
        ("return iteration", "return", 16, "returned nothing"),
        ("return Wrapped(", "return (", 10, "returned a tuple"),
        ("skyline_iteration", "iteration", None, "skyline_iteration_provider"),
    ],
)
def test_an_invalid_provider_is_reported(
    drive_forked: Run, old: str, new: str, line: int | None, says: str
) -> None:
    assert old in SKYLINE
    outcome = drive_forked(SKYLINE.replace(old, new), look, function="skyline_model_provider")
    assert says in outcome.what
    assert outcome.error["where"].endswith(f"train.py:{line}" if line else "train.py")
    assert outcome.error["remedy"]


def test_other_arguments_are_unknown(drive_forked: Run) -> None:
    outcome = drive_forked(SKYLINE, look, function="skyline_model_provider", arguments={"batch": 7})
    assert "batch_size" in outcome.error["remedy"]


def test_inputs_with_samples_in_another_dimension_are_left_alone(drive_forked: Run) -> None:
    source = SKYLINE.replace(
        "return torch.randn(batch_size, 6),", "return torch.randn(4, batch_size, 6)[0],"
    ).replace("torch.randn(4, batch_size, 6)[0]", "torch.randn(9, batch_size, 6)")
    source = source.replace("self.net(inputs)", "self.net(inputs[0])")

    def hidden(built: BuiltWorkload) -> Generator[None, Any, list[Any]]:
        yield
        return [built.reads_batch, built.samples]

    assert drive_forked(source, hidden, function="skyline_model_provider").result == [False, 5]
