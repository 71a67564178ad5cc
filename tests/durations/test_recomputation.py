"""The cost of checkpointing a block: a difference of steps, divided among its blocks."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, chain, count, repeat

import pytest
import torch
from torch.utils import checkpoint

from slipstream.durations import microbenchmark
from slipstream.durations.recomputation import CHECKPOINT, OPERATORS, checkpoint_overhead
from slipstream.graph import Call


def clock_of(durations: Iterator[float]) -> Iterator[int]:
    """Return clock readings before and after works of `durations`."""
    return accumulate(chain.from_iterable((0, int(duration)) for duration in durations))


@pytest.mark.parametrize("name", OPERATORS)
def test_every_operator_saves_one_tensor(name: str) -> None:
    saved: list[torch.Tensor] = []
    x = torch.ones(1, requires_grad=True) * 0.5
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        getattr(torch, name)(x)
    assert len(saved) == 1


def test_the_time_of_the_block_itself_is_subtracted() -> None:
    checkpointed, plain, forward = 1000, 300, 100
    readings = clock_of(chain.from_iterable(repeat((checkpointed, plain, forward))))
    blocks = count_blocks(3)
    assert checkpoint_overhead(3, lambda: next(readings))() == 600 / blocks


def test_noise_never_makes_it_negative() -> None:
    readings = clock_of(chain.from_iterable(repeat((100, 300, 100))))
    assert checkpoint_overhead(2, lambda: next(readings))() == 0


def count_blocks(saved: int) -> int:
    """Checkpointed blocks in a step; checks that each saves `saved` tensors."""
    frames: list[int] = []
    check = checkpoint._CheckpointFrame.check_recomputed_tensors_match

    def counted(frame: checkpoint._CheckpointFrame, gid: int) -> None:
        frames.append(len(frame.weak_holders))
        check(frame, gid)

    ticks = count()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint._CheckpointFrame, "check_recomputed_tensors_match", counted)
        sample = checkpoint_overhead(saved, lambda: next(ticks))
        first = next(ticks)
        before = len(frames)
        sample()
        # Two readings per work, and three works per step with checkpointing.
        steps = (next(ticks) - first - 1) // 6
    assert set(frames) == {saved}
    return (len(frames) - before) // steps


def test_differences_take_the_median_and_times_the_minimum(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def timer(call: Call, clock: object, warm: bool) -> microbenchmark._Timer:
        values = count(1)
        return microbenchmark._Timer(lambda: float(next(values)))

    monkeypatch.setattr(microbenchmark, "_timer", timer)
    monkeypatch.setattr(microbenchmark, "_ROUNDS", 5)
    calls = [Call(f"{CHECKPOINT}(int saved)", (2,)), Call("aten::any_other()", ())]
    found = microbenchmark.run([call.to_json() for call in calls], threads=1)
    assert [timing["nanoseconds"] for timing in found] == [3.0, 1.0]
    # Of 1 to 5: half the interquartile range, over the median.
    assert [timing["spread"] for timing in found] == pytest.approx([1 / 3, 1 / 3])
