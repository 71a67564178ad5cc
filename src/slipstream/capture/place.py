"""Where a step runs: on this thread alone, on several threads, or on a CUDA device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slipstream.workload import BuiltWorkload

_OPERATORS = "aten::"
# Below this share of a step, what other threads do is no part of it worth a lane.
MATTERS = 0.02


@dataclass(frozen=True)
class Place:
    """Where a step runs, other than on the thread that calls it.

    Attributes:
        device: "cuda" where kernels run on one, else "cpu".
        index: of the device; 0 on a CPU.
    """

    device: str
    index: int = 0

    def synchronise(self) -> None:
        """Wait until everything that was begun is done."""
        if self.device == "cuda":
            import torch

            torch.cuda.synchronize(self.index)

    def forget_peak(self) -> None:
        """Have `peak_bytes` tell of what follows alone; on a CUDA device."""
        import torch

        torch.cuda.reset_peak_memory_stats(self.index)

    def peak_bytes(self) -> int:
        """The most that tensors on the CUDA device took at once since `forget_peak`."""
        import torch

        return int(torch.cuda.max_memory_allocated(self.index))

    def profiler(self, *, memory: bool = False) -> Any:
        """A profiler that sees every thread of the host, and the device with what waits for it.

        Args:
            memory: also see what the device's allocator does. Where there is no device it is left
                out: the profiler sees either all threads or their allocations.
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
    """The CUDA device that holds the workload's tensors; None where torch sees no device.

    Of a step that hides its parts, the device that anything is allocated on.
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
class Elsewhere:
    """What of a step ran on other threads than its own.

    Attributes:
        operators: how many.
        share: of the time in operators, that in which one ran on some other thread; or of their
            number, where that is more.
    """

    operators: int
    share: float


def find_elsewhere(events: Iterable[Any]) -> Elsewhere:
    """Operators on other threads than the one that ran most of a step.

    Communication libraries annotate what they do on threads of their own; those run no operators.

    Args:
        events: Kineto's, of a step that was profiled on all threads.
    """
    rows = [
        (event.start_thread_id(), event.start_ns(), event.end_ns())
        for event in events
        if event.name().startswith(_OPERATORS)
    ]
    if not rows:
        return Elsewhere(0, 0.0)
    busiest, _ = Counter(thread for thread, _, _ in rows).most_common(1)[0]
    others = [(start, end) for thread, start, end in rows if thread != busiest]
    there = _covered(others)
    here = _covered([(start, end) for thread, start, end in rows if thread == busiest])
    # The profiler's first step is slow in odd places; how many there are is not disturbed by that.
    return Elsewhere(len(others), max(there / max(here + there, 1), len(others) / len(rows)))


def _covered(spans: Iterable[tuple[int, int]]) -> int:
    """How much time lies within any of the spans."""
    covered, until = 0, 0
    for start, end in sorted(spans):
        covered += max(end - max(start, until), 0)
        until = max(until, end)
    return covered
