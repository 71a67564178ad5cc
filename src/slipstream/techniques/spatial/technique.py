"""Images in tiles on several devices, and batch norm over groups of replicas.

With a fixed batch there are fewer samples than devices at some point; from then on several devices
share each image. Source: Kumar et al., MLSys 2021, arXiv 2011.03641.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

from slipstream.cluster import Cluster, Collective, Group, Mesh
from slipstream.durations import CallChanges, required_timings, rescale
from slipstream.errors import InvalidArgumentError, WorkloadError
from slipstream.graph import Call, Editor, Graph, Role, StepPhase, TensorSpec, insert_exchange
from slipstream.technique import CodeChange, Context, Quality, QualityKind, Stage, Traits
from slipstream.techniques.distributed.ddp import DDP, copying, put_copy
from slipstream.techniques.distributed.replicas import (
    ON_REPLICAS,
    REPLICAS,
    OnReplicas,
    Spreads,
    all_reduces,
)
from slipstream.techniques.spatial.window import Window

if TYPE_CHECKING:
    from slipstream.workload import BuiltWorkload, Workload

_AXES = ("row", "column")
# By operator: position of the image, and of kernel, stride, padding and dilation; the kernel of a
# convolution is the extent of its weight.
_WINDOWS = {
    "aten::convolution": (0, (1, 3, 4, 5)),
    "aten::convolution_backward": (1, (2, 4, 5, 6)),
    "aten::max_pool2d_with_indices": (0, (1, 2, 3, 4)),
    "aten::max_pool2d_with_indices_backward": (1, (2, 3, 4, 5)),
    "aten::avg_pool2d": (0, (1, 2, 3, None)),
    "aten::avg_pool2d_backward": (1, (2, 3, 4, None)),
}
_TRANSPOSED = {"aten::convolution": 6, "aten::convolution_backward": 7}
# Sizes among their arguments would have to change too; they take no time.
_VIEWS = frozenset({"aten::view", "aten::_unsafe_view", "aten::expand", "aten::as_strided"})
# Techniques that make replicas without DistributedDataParallel.
_NOT_DDP = frozenset({"adasum", "burst", "fsdp", "pipeline", "priority_sync", "spatial"})
_NORMS = ("aten::native_batch_norm", "aten::native_batch_norm_backward")


class _Site(NamedTuple):
    """An operator with windows: its task, image, and window per axis."""

    task: int
    image: TensorSpec
    windows: tuple[Window, Window]
    backward: bool


@dataclass(frozen=True)
class Spatial(Spreads):
    """Each image in tiles on `workers` devices, which exchange the borders of the tiles.

    Attributes:
        workers: number of tiles, on the first devices of the cluster.
        rows: number of tiles along the height; 0 chooses the most square grid.
    """

    workers: int = 2
    rows: int = 0

    name: ClassVar[str] = "spatial"
    traits: ClassVar[Traits] = replace(
        REPLICAS, axis="tile", conflicts=frozenset({"compile", "cuda_graphs", "accumulation"})
    )
    effect: ClassVar[Quality] = Quality(
        QualityKind.ROUNDING, "statistics and gradients are summed over tiles"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rows < 0 or (self.rows and self.workers % self.rows):
            raise InvalidArgumentError(
                "spatial:rows", f"{self.workers} tiles do not make {self.rows} rows",
                remedy="for example spatial:4,rows=2",
            )  # fmt: skip

    @property
    def grid(self) -> tuple[int, int]:
        """Number of tiles along height and width."""
        rows = self.rows or max(
            n for n in range(1, math.isqrt(self.workers) + 1) if self.workers % n == 0
        )
        return (rows, self.workers // rows) if self.rows else (self.workers // rows, rows)

    def why_not(self, graph: Graph, workload: Workload | None = None) -> str | None:
        """Return why the images cannot be divided; None if they can."""
        if (reason := super().why_not(graph, workload)) is not None:
            return reason
        if any(call.name in _TRANSPOSED and call.arguments[_TRANSPOSED[call.name]]
               for call in graph.calls):  # fmt: skip
            return "transposed convolutions cannot compute tiles"
        sites = list(_sites(graph))
        if not sites:
            return "the step has no convolution or pooling of images"
        for site in sites:
            for size, tiles, window in zip(
                site.image.shape[-2:], self.grid, site.windows, strict=True
            ):
                try:
                    window.needs(size, tiles)
                except InvalidArgumentError as error:
                    return f"{graph.task(site.task).module}: {error.what}"
        return None

    def required_timings(self, graph: Graph) -> Sequence[Any]:
        """Return operators on tiles, copies into extended tiles, and of gradients into buckets."""
        changed = required_timings(graph, self._changes(graph))
        copies = [copying(self._extended(site)) for site in _sites(graph)]
        return [*changed, *copies, *DDP(self.workers).required_timings(graph)]

    def predict(self, graph: Graph, context: Context) -> Graph:
        """Resize operators to tiles; insert halos, statistics and the average of gradients."""
        cluster = self.need_cluster(context)
        # Fails if there are too few devices.
        whole = self.group(cluster)
        edit, changes = Editor(graph, str(self)), self._changes(graph)
        rescale(edit, graph, changes, context.durations)
        mesh = Mesh(np.arange(self.workers).reshape(self.grid), _AXES)
        halos = 0
        for site in _sites(graph):
            halos += (count := self._exchange(edit, cluster, mesh, site))
            if count:
                put_copy(
                    edit, context, self._extended(site), site.task, "of tile and halo",
                    before=not site.backward,
                )  # fmt: skip
        put_statistics(edit, graph, cluster, Group.of(whole.members))
        if len(graph.memory):
            self._shrink(edit, graph, changes)
        rows, columns = self.grid
        tiled = edit.apply(f"{rows} x {columns} tiles of each image; {halos} halo exchanges")
        averaged = DDP(self.workers).predict(tiled, context)
        return replace(averaged, samples=graph.samples)

    def _changes(self, graph: Graph) -> CallChanges:
        passes = np.flatnonzero(np.isin(graph.tasks.phase, (StepPhase.FORWARD, StepPhase.BACKWARD)))
        extents = {site.image.shape[-2:] for site in _sites(graph)}
        extents |= {
            call.outputs[0].shape[-2:]
            for call in graph.calls
            if call.name in _WINDOWS and call.outputs
        }
        new = {
            number: tiled
            for number, call in enumerate(graph.calls)
            if (tiled := _on_tile(call, self.grid, extents)) is not None
        }
        return CallChanges.by_call(graph, passes, new)

    def _exchange(self, edit: Editor, cluster: Cluster, mesh: Mesh, site: _Site) -> int:
        """Insert a halo exchange per axis; return their number."""
        done, ready = 0, site.task - (not site.backward)
        sizes = zip(site.image.shape[-2:], self.grid, strict=True)
        extended = [-(-size // tiles) for size, tiles in sizes]
        for axis, (window, tiles) in enumerate(zip(site.windows, self.grid, strict=True)):
            size = site.image.shape[axis - 2]
            rows = max(window.halo(size, tiles, tile) for tile in range(tiles))
            if not rows:
                continue
            # A tile in the middle sends to both sides.
            one_side = -(-rows // min(tiles - 1, 2))
            numel = math.prod(site.image.shape[:-2]) * one_side * extended[1 - axis]
            extended[axis] += rows
            nbytes = numel * site.image.nbytes // site.image.numel
            ready = insert_exchange(
                edit, cluster, Collective("halo", nbytes, mesh[_AXES[axis]]),
                beside=site.task - (not site.backward), ready=ready, awaited=-1,
                name="halo exchange", purpose="halo",
            )  # fmt: skip
            done += 1
        if done:
            edit.connect(ready, site.task + site.backward)
        return done

    def _extended(self, site: _Site) -> TensorSpec:
        """Return the largest tile of the site's image with its halo, along divided axes."""
        size = list(site.image.shape[-2:])
        for axis, (tiles, window) in enumerate(zip(self.grid, site.windows, strict=True)):
            if tiles > 1:
                size[axis] = max(high - low for low, high in window.needs(size[axis], tiles))
        return site.image.resized((*site.image.shape[:-2], *size))

    def _shrink(self, edit: Editor, graph: Graph, changes: CallChanges) -> None:
        """Resize what operators on tiles allocate, as their largest tensor."""
        memory, ratio = graph.memory, np.ones(len(graph) + 1)
        each = [
            max(spec.nbytes for spec in (*new.inputs, *new.outputs))
            / max(spec.nbytes for spec in (*old.inputs, *old.outputs))
            for old, new in changes.pairs
        ]
        ratio[changes.tasks] = np.array(each)[changes.pair]
        smaller = (memory.producer >= 0) & (ratio[memory.producer] < 1.0)
        rows = np.flatnonzero(smaller & (memory.role != Role.GRADIENT))
        edit.resize(rows, np.rint(memory.nbytes[rows] * ratio[memory.producer[rows]]))

    def apply(self, built: BuiltWorkload) -> None:
        """Divide the images of the model among `workers` processes that have joined a group.

        All ranks train with the batch of rank 0.

        Raises:
            WorkloadError: the group has another size, or the model cannot compute tiles.
        """
        import torch
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel
        from torch.utils._pytree import tree_leaves

        from slipstream.techniques.spatial.nn import partition

        self.need_joined()
        self.need_part(built.model, "the model")
        tensors = [leaf for leaf in tree_leaves(built.batch) if isinstance(leaf, torch.Tensor)]
        if not tensors or tensors[0].dim() != 4:
            raise WorkloadError(
                "spatial needs a batch whose first tensor has images, [n, c, height, width]",
                remedy="return (model, (images, targets), loss, optimizer)",
            )
        for tensor in tensors:
            shared = tensor.detach().contiguous()
            dist.broadcast(shared, 0)
            tensor.detach().copy_(shared)
        rows, columns = self.grid
        partition(built.model, tensors[0], rows, columns)
        built.model = DistributedDataParallel(built.model)
        # The ranks share the samples of a step.
        each, remainder = divmod(built.samples_before, self.workers)
        built.samples = each + (built.rank < remainder)

    def code(self, workload: Workload) -> CodeChange | None:
        """Return manual steps."""
        rows, columns = self.grid
        return self.by_hand(
            '"gloo"',
            f"slipstream.spatial.partition(model, images, rows={rows}, columns={columns}); "
            "model = torch.nn.parallel.DistributedDataParallel(model)",
        )


@dataclass(frozen=True)
class BatchNormGroups(OnReplicas):
    """Batch norm with the statistics of groups of `ranks` consecutive replicas."""

    ranks: int = 2

    name: ClassVar[str] = "batch_norm_groups"
    traits: ClassVar[Traits] = replace(
        ON_REPLICAS, hook="none", stage=Stage.DISTRIBUTION + 1, conflicts=_NOT_DDP
    )
    effect: ClassVar[Quality] = Quality(
        QualityKind.NEEDS_TRAINING, "batch norm normalises the samples of several replicas"
    )

    def __post_init__(self) -> None:
        if self.ranks < 1:
            raise InvalidArgumentError(
                "batch_norm_groups:ranks", f"{self.ranks} is less than 1",
                remedy="for example batch_norm_groups:8",
            )  # fmt: skip

    def why_not(self, graph: Graph, workload: Workload | None = None) -> str | None:
        """Return why there are no such groups; None if there are."""
        if not any(call.name in _NORMS for call in graph.calls):
            return "the step has no batch norm"
        if (reason := self.why_no_replicas(graph)) is not None:
            return reason
        if graph.workers % self.ranks:
            return f"{graph.workers} workers do not make groups of {self.ranks}"
        return None

    def predict(self, graph: Graph, context: Context) -> Graph:
        """Insert all-reduces of statistics in every batch norm."""
        cluster = self.need_cluster(context)
        (row, *_) = all_reduces(graph)
        assert row.collective.group is not None
        group = Group.of(row.collective.group.members.reshape(-1, self.ranks))
        edit = Editor(graph, str(self))
        count = put_statistics(edit, graph, cluster, group) if self.ranks > 1 else 0
        return edit.apply(f"{count} all-reduces of statistics in groups of {self.ranks}")

    def apply(self, built: BuiltWorkload) -> None:
        """Change the batch norms of a model in DistributedDataParallel.

        Raises:
            WorkloadError: the model is not wrapped or has no batch norm.
            InvalidArgumentError: `ranks` does not divide the number of processes.
        """
        from slipstream.techniques.spatial.nn import group_batch_norm

        group_batch_norm(self.need_ddp(built, str(self)), self.ranks)

    def code(self, workload: Workload) -> CodeChange | None:
        """Return a manual step."""
        return CodeChange(
            "",
            "after model = DistributedDataParallel(model), by hand:\n"
            f"    slipstream.spatial.group_batch_norm(model, ranks={self.ranks})",
        )


def put_statistics(edit: Editor, graph: Graph, cluster: Cluster, group: Group) -> int:
    """Insert two sums per batch norm's forward pass and one per backward; return their number."""
    count = 0
    for task in range(len(graph)):
        call = graph.task(task).call
        if call is None or call.name not in _NORMS:
            continue
        forward = call.name == _NORMS[0]
        channels = next(spec.shape[1] for spec in call.inputs if len(spec.shape) > 1)
        ready = task - 1 if forward else task
        # Sums of values, then of squares; both sums of gradients together.
        for _ in range(1 + forward):
            ready = insert_exchange(
                edit, cluster, Collective("all_reduce", 4.0 * channels * (2 - forward), group),
                beside=task - forward, ready=ready, awaited=-1, name="sum of statistics",
                purpose="statistic",
            )  # fmt: skip
            count += 1
        edit.connect(ready, task + (not forward))
    return count


def _sites(graph: Graph) -> Iterator[_Site]:
    """Yield the operators that need halos, in program order."""
    for task in range(len(graph)):
        call = graph.task(task).call
        if call is None or call.name not in _WINDOWS:
            continue
        position, _ = _WINDOWS[call.name]
        image = call.arguments[position]
        if len(image.shape) != 4 or image.shape[-2:] == (1, 1):
            continue
        backward = call.name.endswith("_backward")
        # The gradient of the batch is not computed.
        if call.name == "aten::convolution_backward" and not call.arguments[-1][0]:
            continue
        yield _Site(task, image, _windows(call), backward)


def _windows(call: Call) -> tuple[Window, Window]:
    _, (kernel, stride, padding, dilation) = _WINDOWS[call.name]
    extents = call.arguments[kernel]
    if isinstance(extents, TensorSpec):
        extents = extents.shape[-2:]
    columns = [extents, call.arguments[stride] or extents, call.arguments[padding]]
    columns.append((1, 1) if dilation is None else call.arguments[dilation])
    first, second = (Window(*(int(column[axis % len(column)]) for column in columns))
                     for axis in range(2))  # fmt: skip
    return first, second


def _on_tile(call: Call, grid: tuple[int, int], extents: set[tuple[int, ...]]) -> Call | None:
    """Return the call on the largest tile; None if it does not depend on it."""
    if call.name in _VIEWS:
        return None

    def tile(spec: TensorSpec) -> TensorSpec:
        if len(spec.shape) != 4 or spec.shape[-2:] not in extents or spec.shape[-2:] == (1, 1):
            return spec
        size = (-(-n // t) for n, t in zip(spec.shape[-2:], grid, strict=True))
        return spec.resized((*spec.shape[:-2], *size))

    weight = -1
    if call.name in ("aten::convolution", "aten::convolution_backward"):
        weight = _WINDOWS[call.name][1][0] or 0
    arguments: list[Any] = [
        tile(value) if isinstance(value, TensorSpec) and n != weight else value
        for n, value in enumerate(call.arguments)
    ]
    outputs = tuple(tile(spec) for spec in call.outputs)
    if call.name in _WINDOWS:
        position, columns = _WINDOWS[call.name]
        gradient = arguments[0] if position else outputs[0]
        windows = _windows(call)
        size = [
            (n - 1) * w.stride + w.dilation * (w.kernel - 1) + 1
            for n, w in zip(gradient.shape[-2:], windows, strict=True)
        ]
        image = call.arguments[position]
        if tile(image) is image:
            return None
        # The halo contains the padding.
        arguments[position] = image.resized((*image.shape[:-2], *size))
        arguments[columns[2]] = tuple(0 for _ in call.arguments[columns[2]])
        if position and len(call.outputs[0].shape) == 4 and weight < 0:
            outputs = (arguments[position], *outputs[1:])
        elif position:
            outputs = call.outputs
            if call.arguments[-1][0]:
                outputs = (arguments[position], *outputs[1:])
    tiled = Call(call.op, tuple(arguments), outputs)
    return None if tiled == call else tiled
