"""Load data in worker processes, ahead of the step that needs it.

Source: ``num_workers`` of PyTorch's ``torch.utils.data.DataLoader``.
"""

from __future__ import annotations

import functools
import inspect
import multiprocessing
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from slipstream.durations import TimingRequest, usable_cores
from slipstream.errors import InvalidArgumentError, WorkloadError
from slipstream.graph import (
    PROVENANCES,
    Call,
    Dependency,
    Edges,
    Editor,
    Graph,
    Kind,
    Price,
    TensorSpec,
    price,
)
from slipstream.provenance import Provenance
from slipstream.technique import (
    CodeChange,
    Context,
    Quality,
    QualityKind,
    Stage,
    TechniqueSettings,
    Traits,
)
from slipstream.workload import BuiltWorkload, Workload

# Annotations by torch of ``__next__`` of its two kinds of loader.
_SINGLE = "enumerate(DataLoader)#_SingleProcess"
_SEVERAL = "enumerate(DataLoader)#_MultiProcessing"
_TAKE = "take a batch from a worker"
# For batches of unknown tensors: the rate at which a typical core touches new pages.
_ASSUMED_BYTES_PER_NS = 4.0
_ASSUMED_TAKE_NS = 200_000.0
# Workers on separate cores still share caches and memory with the step.
_SPREAD = 0.1
# With more lanes than cores, the system schedules them.
_CROWDED_SPREAD = 0.4
_PREPARED = "prepared"
_KINDS = {True: "given workers", False: "unchanged"}
_seen: Counter[str] = Counter()
"""Counts of loaders created since `DataLoader.prepare`, by kind."""


@dataclass(frozen=True)
class DataLoader(TechniqueSettings):
    """Give every loader without workers this number of worker processes."""

    workers: int = 2

    name: ClassVar[str] = "dataloader"
    traits: ClassVar[Traits] = Traits(stage=Stage.COMPILE + 4, clock="wall")
    effect: ClassVar[Quality] = Quality(
        QualityKind.SAME_DISTRIBUTION,
        "the same order of samples; random numbers of the dataset come from different seeds",
    )

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise InvalidArgumentError("dataloader:workers", f"{self.workers} is less than 1")

    def why_not(self, graph: Graph, workload: Workload | None = None) -> str | None:
        """Return why there is no loading to move to workers; None if there is."""
        if workload is not None and workload.live is not None:
            return "an existing loader cannot get workers; pass a file.py:function"
        scopes = set(graph.texts("scope"))
        if any(scope.startswith(_SEVERAL) for scope in scopes):
            return "its DataLoader has workers already"
        if not any(scope.startswith(_SINGLE) for scope in scopes):
            return "the step does not read batches from a torch DataLoader"
        return None

    def required_timings(self, graph: Graph) -> Sequence[TimingRequest]:
        """Return the transfer of a finished batch from a worker."""
        specs = _batch(graph, _loading(graph))
        return [_take(specs)] if specs else []

    def predict(self, graph: Graph, context: Context) -> Graph:
        """Move the loading to separate lanes, one step ahead, from which the step takes a batch.

        Every worker lane loads its share of each batch, which on average equals `workers` processes
        that each load whole batches. The step waits if all of them together are slower than it.
        """
        loading = _loading(graph)
        edit = Editor(graph, str(self))
        taking = self._taking(graph, loading, context)
        edit.remove(loading)
        edit.insert(
            int(loading[0]), _TAKE, taking.nanoseconds, taking.provenance, before=True,
            spread=taking.spread,
            gap_ns=float(graph.tasks.gap_ns[loading].sum()), kind=Kind.WAIT,
        )  # fmt: skip
        work_ns = float(graph.tasks.duration_ns[loading].sum())
        edited = edit.apply(f"{work_ns / 1e6:.3g} ms of data loading in {self.workers} workers")
        return self._with_workers(edited, graph, loading, taking.nanoseconds)

    def apply(self, built: BuiltWorkload) -> None:
        """Check that `prepare` changed a loader, since existing loaders cannot be changed.

        Raises:
            WorkloadError: `prepare` was not called, no loader was created, or none that supports
                workers.
        """
        if not _seen[_PREPARED]:
            raise WorkloadError(
                "an existing DataLoader cannot get workers",
                remedy="pass a script or a file.py:function, so that it starts with workers",
            )
        if _seen[_KINDS[True]]:
            return
        if _seen[_KINDS[False]]:
            raise WorkloadError(
                "no DataLoader of this workload can be given workers: "
                "they have some, or read an IterableDataset, which every worker would repeat",
                remedy="let the dataset read worker_info, and set num_workers= in the code",
            )
        if built.step.__module__ == type(built).__module__:
            # A user-defined step may create one later.
            raise WorkloadError(
                f"{built.name} has not created a torch DataLoader since its start",
                remedy="pass a script that trains from one, or a file.py:function whose step "
                "takes its batches from one",
            )

    def prepare(self) -> None:
        """Give workers to every loader that the user's code creates from now on."""
        import torch.utils.data

        loader: Any = torch.utils.data.DataLoader
        loader.__init__ = _with_workers(loader.__init__, self.workers)
        _seen.clear()
        _seen[_PREPARED] = 1

    def code(self, workload: Workload) -> CodeChange | None:
        """Return ``num_workers=N, persistent_workers=True`` at the construction of the loader."""
        return CodeChange.of(
            workload,
            lambda where: where.set_call(
                "torch.utils.data.DataLoader",
                num_workers=str(self.workers),
                persistent_workers="True",
            ),
            by_hand=f"DataLoader(..., num_workers={self.workers}, persistent_workers=True)",
            note="if processes are spawned (Windows, macOS, Python 3.14), a script must run code "
            "under `if __name__ == '__main__':`",
            technique=self,
        )

    def _taking(self, graph: Graph, loading: NDArray[np.int64], context: Context) -> Price:
        """Return the time that the step needs to take a batch."""
        specs = _batch(graph, loading)
        size = sum(spec.nbytes for spec in specs)
        otherwise_ns = _ASSUMED_TAKE_NS + size / _ASSUMED_BYTES_PER_NS
        if not specs:
            return Price(otherwise_ns, 1.0, Provenance.ASSUMED)
        return price(context.durations, _take(specs), otherwise_ns, spread=1.0)

    def _with_workers(
        self, edited: Graph, graph: Graph, loading: NDArray[np.int64], taking_ns: float
    ) -> Graph:
        """Return `edited` with the tasks `loading` of `graph` on separate lanes."""
        n, each, first_lane = len(edited), len(loading), len(edited.lanes)
        stretch, spread = self._crowding(graph, loading, taking_ns)
        order = np.tile(loading, self.workers)
        moved = graph.tasks.take(order)
        moved = replace(
            moved,
            lane=(first_lane + np.repeat(np.arange(self.workers), each)).astype(np.int32),
            duration_ns=moved.duration_ns * stretch / self.workers,
            gap_ns=np.zeros(len(order)),
            spread=np.maximum(moved.spread, spread),
            provenance=np.full(len(order), PROVENANCES.index(Provenance.SIMULATED), np.uint8),
        )
        (take,) = np.flatnonzero(edited.tasks.name == edited.strings.index(_TAKE))
        # The next step waits for each worker's last task before it takes a batch.
        ends = n + each * np.arange(1, self.workers + 1) - 1
        ones = np.ones(self.workers)
        waits = Edges.of(ends, ones * take, ones * Dependency.DATA, ones * 0, ones)
        starts, operands = graph.gathered(order)
        return replace(
            edited,
            tasks=edited.tasks.joined(moved),
            edges=edited.edges.joined(waits),
            lanes=(*edited.lanes, *(f"loader {worker}" for worker in range(self.workers))),
            operand_start=np.concatenate(
                [edited.operand_start, edited.operand_start[-1] + starts[1:]]
            ),
            operands=np.concatenate([edited.operands, operands]),
        )

    def _crowding(
        self, graph: Graph, loading: NDArray[np.int64], taking_ns: float
    ) -> tuple[float, float]:
        """Return the slow-down of loading if there are more lanes than cores, and its spread.

        In a step, the cores run the work of all of the step's threads and all workers.
        """
        threads, cores = int(graph.meta.get("threads", 1)), usable_cores()
        crowded = threads + self.workers > cores or bool(graph.meta.get("contended"))
        total = float(graph.tasks.duration_ns.sum() + graph.tasks.gap_ns.sum())
        work = float(graph.tasks.duration_ns[loading].sum())
        alone = work / self.workers
        shared = ((total - work + taking_ns) * threads + work) / cores
        if not crowded or not alone:
            return 1.0, _SPREAD
        return max(1.0, shared / alone), _CROWDED_SPREAD


def _loading(graph: Graph) -> NDArray[np.int64]:
    """Return the tasks that load data in the process of the step."""
    inside = np.array([text.startswith(_SINGLE) for text in graph.strings])
    return np.flatnonzero(inside[graph.tasks.scope])


def _batch(graph: Graph, loading: NDArray[np.int64]) -> tuple[TensorSpec, ...]:
    """Return the tensors that loading creates and the rest of the step reads."""
    loaded: set[int] = set()
    for task in loading.tolist():
        loaded.update(graph.task(task).operands[1])
    loaded.discard(-1)
    specs: dict[int, TensorSpec] = {}
    for task in range(int(loading[-1]) + 1, len(graph)):
        call = graph.task(task).call
        if call is None:
            continue
        inputs, outputs = graph.task(task).operands
        for spec, storage in zip(call.inputs, inputs, strict=False):
            if storage in loaded:
                specs.setdefault(storage, spec)
        # A storage that is written again contains another tensor.
        loaded.difference_update(set(outputs) - set(specs))
    return tuple(specs.values())


def _take(specs: tuple[TensorSpec, ...]) -> TimingRequest:
    return TimingRequest(Call("slipstream::take_batch()", specs))


def _with_workers(make: Callable[..., None], workers: int) -> Callable[..., None]:
    """Return ``DataLoader.__init__`` that adds workers to loaders that support but lack them."""
    from torch.utils.data import IterableDataset

    signature = inspect.signature(make)

    @functools.wraps(make)
    def make_parallel(*args: Any, **kwargs: Any) -> None:
        arguments = signature.bind_partial(*args, **kwargs).arguments
        dataset = arguments["dataset"]
        eligible = not arguments.get("num_workers") and not isinstance(dataset, IterableDataset)
        _seen[_KINDS[eligible]] += 1
        if eligible:
            arguments["num_workers"] = workers
            arguments["persistent_workers"] = True
            if sys.platform == "linux" and "fork" in multiprocessing.get_all_start_methods():
                # A spawned process cannot import a dataset that is defined in a script.
                arguments.setdefault("multiprocessing_context", "fork")
        make(**arguments)

    return make_parallel
