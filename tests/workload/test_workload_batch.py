"""Batches of another size, in all forms of batches."""

from __future__ import annotations

from collections import UserDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from slipstream.errors import WorkloadError
from slipstream.workload import BuiltWorkload, build_from
from slipstream.workload.batch import resized

Pair = namedtuple("Pair", "inputs targets")


@dataclass
class Record:
    tokens: torch.Tensor
    name: str


def tokens(rows: int = 4) -> torch.Tensor:
    return torch.arange(rows * 6).view(rows, 6)


@pytest.mark.parametrize("target", [1, 2, 4, 7, 8])
def test_samples_are_cut_off_or_repeated(target: int) -> None:
    found = resized(tokens(), 4, target)
    assert [row[0].item() // 6 for row in found] == [i % 4 for i in range(target)]


def test_every_kind_of_nesting_is_preserved() -> None:
    mask = torch.ones(3, 3)
    batch: dict[str, Any] = {
        "a": [tokens(), (tokens().float(), 7)],
        "b": Pair(tokens(), "text"),
        "c": Record(tokens(), "one"),
        "d": UserDict(ids=tokens()),
        "mask": mask,
        "scalar": torch.tensor(3.0),
    }
    found = resized(batch, 4, 2)
    assert found["a"][0].shape == found["a"][1][0].shape == (2, 6)
    assert found["a"][1][1] == 7
    assert type(found["b"]) is Pair
    assert found["b"].inputs.shape == (2, 6)
    assert found["b"].targets == "text"
    assert found["c"].tokens.shape == (2, 6)
    assert type(found["d"]) is UserDict
    assert found["d"]["ids"].shape == (2, 6)
    assert found["mask"] is mask
    assert found["scalar"] is batch["scalar"]
    assert batch["d"]["ids"].shape == (4, 6)


def test_flattened_targets_follow_their_tokens() -> None:
    inputs, targets = resized((tokens(), tokens().reshape(-1)), 4, 6)
    torch.testing.assert_close(inputs.reshape(-1), targets)


def test_flattened_pixels_follow_their_images() -> None:
    images, pixels = torch.randn(4, 3, 5, 2), torch.zeros(4 * 5 * 2)
    assert resized((images, pixels), 4, 2)[1].shape == (2 * 5 * 2,)


def test_a_multiple_that_is_not_a_flattened_tensor_is_kept() -> None:
    positions = torch.zeros(8)
    assert resized((tokens(), positions), 4, 2)[1] is positions


def test_strides_are_those_of_a_new_batch_of_that_size() -> None:
    padded = torch.randn(4, 7)[:, :-1]
    assert resized(padded, 4, 2).stride() == torch.randn(2, 7)[:, :-1].stride()
    time_first = torch.randn(5, 4, 3).transpose(0, 1)
    found = resized(time_first, 4, 8)
    assert found.stride() == torch.randn(5, 8, 3).transpose(0, 1).stride()
    torch.testing.assert_close(found[4:], time_first)
    pictures = torch.randn(4, 3, 5, 5).contiguous(memory_format=torch.channels_last)
    assert resized(pictures, 4, 2).is_contiguous(memory_format=torch.channels_last)


def test_differentiated_inputs_stay_leaves() -> None:
    found = resized(torch.randn(4, 2, requires_grad=True), 4, 2)
    assert found.requires_grad
    assert found.is_leaf


def built(samples: int = 0) -> BuiltWorkload:
    model = nn.Linear(6, 1)
    batch = (tokens().float(), torch.randn(4, 1))
    result = BuiltWorkload(model, batch, nn.functional.mse_loss, None, samples=samples)
    return build_from(result, (), 0, "test")


def test_a_resized_workload_runs_on_that_many_samples() -> None:
    workload = built()
    workload.resize(6)
    assert workload.samples == workload.rows == 6
    assert workload.batch[1].shape == (6, 1)
    assert workload.step().shape == ()


def test_inputs_that_are_also_targets_stay_so() -> None:
    images = torch.randn(4, 6)
    first, two = resized((images, images), 4, 6)
    assert first is two
    first, two = resized((images, images.clone()), 4, 6)
    assert first.data_ptr() != two.data_ptr()


def test_several_samples_per_row_stay_several() -> None:
    workload = built(samples=16)
    workload.resize(8)
    assert (workload.samples, workload.rows) == (8, 2)
    with pytest.raises(WorkloadError, match="not a whole batch"):
        workload.resize(9)


def test_a_user_defined_step_hides_its_batch() -> None:
    workload = build_from({"step": lambda: None, "batch": tokens()}, (), 0, "test")
    with pytest.raises(WorkloadError, match="hides its batch") as error:
        workload.resize(8)
    assert "set the batch size where the data is loaded" in str(error.value.remedy)
