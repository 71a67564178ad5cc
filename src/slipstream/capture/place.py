"""Detect where a step runs: on this thread alone, on several threads, or on a CUDA device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slipstream.workload import BuiltWorkload

_OPERATORS = "aten::"
# Minimum share of a step on other threads for separate lanes.
MIN_SHARE = 0.02


@dataclass(frozen=True)
class Place:
    """Place where a step runs, other than the calling thread.

    Attributes:
        device: "cuda" or "cpu".
        index: Index of the device; 0 on a CPU.
    """

    device: str
    index: int = 0

    def synchronise(self) -> None:
        """Wait until all issued work is done."""
        if self.device == "cuda":
            import torch

            torch.cuda.synchronize(self.index)

    def forget_peak(self) -> None:
        """Reset `peak_bytes` on the CUDA device."""
        import torch

        torch.cuda.reset_peak_memory_stats(self.index)

    def peak_bytes(self) -> int:
        """Return the peak of tensor memory on the CUDA device since `forget_peak`."""
        import torch

        return int(torch.cuda.max_memory_allocated(self.index))

    def profiler(self, *, memory: bool = False) -> Any:
        """Return a profiler of all host threads, and of the device with synchronization.

        Args:
            memory: Whether to record allocations on the device. Ignored without a device: the
                profiler records either all threads or their allocations.
        """
        import torch
        from torch._C._profiler import _ExperimentalConfig

        activities = [torch.profiler.ProfilerActivity.CPU]
        if self.device == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        # A device's threads inherit the profiler from the thread that calls backward().
        several = self.device == "cpu"
        return torch.profiler.profile(
            activities=activities,
            profile_memory=memory and not several,
            experimental_config=_ExperimentalConfig(
                enable_cuda_sync_events=self.device == "cuda", profile_all_threads=several
            ),
        )


def find_device(built: BuiltWorkload) -> Place | None:
    """Return the CUDA device of the workload's tensors; None without one.

    For a step that hides its model, return a device with any allocation.
    """
    import torch
    from torch.utils._pytree import tree_leaves

    if not torch.cuda.is_available():
        return None
    parts: list[Any] = list(built.model.parameters()) if built.model is not None else []
    parts += [p for g in getattr(built.optimizer, "param_groups", ()) for p in g["params"]]
    parts += tree_leaves(built.batch)
    for part in parts:
        if isinstance(part, torch.Tensor) and part.device.type == "cuda":
            return Place("cuda", part.device.index or 0)
    for index in range(torch.cuda.device_count() if built.model is None else 0):
        if torch.cuda.memory_allocated(index):
            return Place("cuda", index)
    return None


@dataclass(frozen=True)
class OffThreadWork:
    """Operators of a step that ran off its busiest thread.

    Attributes:
        operators: Number of these operators.
        share: Their share of the time in operators, or of the number of operators if that is
            larger.
    """

    operators: int
    share: float


def find_off_thread_work(events: Iterable[Any]) -> OffThreadWork:
    """Find the operators off the thread that ran most of a step.

    Threads of communication libraries have annotations but no operators.

    Args:
        events: Kineto events of a step that was profiled on all threads.
    """
    rows = [
        (event.start_thread_id(), event.start_ns(), event.end_ns())
        for event in events
        if event.name().startswith(_OPERATORS)
    ]
    if not rows:
        return OffThreadWork(0, 0.0)
    busiest, _ = Counter(thread for thread, _, _ in rows).most_common(1)[0]
    others = [(start, end) for thread, start, end in rows if thread != busiest]
    off = _covered(others)
    on = _covered([(start, end) for thread, start, end in rows if thread == busiest])
    # Startup of the profiler distorts times, but not the number of operators.
    return OffThreadWork(len(others), max(off / max(on + off, 1), len(others) / len(rows)))


def _covered(spans: Iterable[tuple[int, int]]) -> int:
    """Return the length of the union of the spans."""
    covered, until = 0, 0
    for start, end in sorted(spans):
        covered += max(end - max(start, until), 0)
        until = max(until, end)
    return covered
