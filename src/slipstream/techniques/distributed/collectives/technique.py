"""All-reduce by the dimensions of a grid: within a row first, then across, with a share each.

On an x by y grid a bucket of S bytes is reduce-scattered along y, all-reduced along x as S/y bytes
a worker, and all-gathered along y: the slower dimension carries 1/y of the bytes, and the latency
grows with x + y instead of x y. Source: Kumar et al., MLSys 2021, arXiv 2011.03641.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from slipstream.cluster import Group
from slipstream.errors import InvalidArgumentError, WorkloadError
from slipstream.graph import Editor, Graph, replace_exchange
from slipstream.technique import CodeChange, Context, Stage, Traits
from slipstream.techniques.distributed.replicas import (
    ON_REPLICAS,
    OnReplicas,
    all_reduces,
    speaks_gloo,
)

if TYPE_CHECKING:
    from slipstream.workload import BuiltWorkload, Workload


@dataclass(frozen=True)
class TwoDAllReduce(OnReplicas):
    """All-reduces of replicas by `rows` rows of workers; 0: the cluster's own dimensions."""

    rows: int = 0

    name: ClassVar[str] = "two_d_allreduce"
    traits: ClassVar[Traits] = replace(ON_REPLICAS, stage=Stage.DISTRIBUTION + 2)

    def __post_init__(self) -> None:
        if self.rows < 0:
            raise InvalidArgumentError(
                "two_d_allreduce:rows",
                f"{self.rows} is less than 0",
                remedy="for example two_d_allreduce:8",
            )

    def why_not(self, graph: Graph, workload: Workload | None = None) -> str | None:
        """None, or why there is no grid to all-reduce over."""
        if (reason := self.why_no_replicas(graph)) is not None:
            return reason
        for row in all_reduces(graph):
            group = row.collective.group
            if self.rows and row.ranks % self.rows:
                return f"{row.ranks} workers do not make {self.rows} rows"
            if not self.rows and (group is None or len(group.shape) < 2):
                return "the workers have no dimensions on this cluster; name them: :rows=4"
        return None

    def predict(self, graph: Graph, context: Context) -> Graph:
        """Price every all-reduce by dimensions."""
        from slipstream.techniques.distributed.collectives.choice import grid_ns

        cluster = self.need_cluster(context)
        edit = Editor(graph, str(self))
        for row in all_reduces(graph):
            if row.collective.group is None:
                continue
            group = self._grid(row.collective.group)
            by_dimensions = replace(row.collective, group=group, algo="2d")
            duration_ns = None
            if speaks_gloo(cluster) and len(group.shape) == 2:
                duration_ns = grid_ns(
                    cluster, row.collective.nbytes, group.members.reshape(group.shape)
                )
            replace_exchange(
                edit, row, cluster, encode=(), transfers=[by_dimensions], decode=(), name="2-D ",
                duration_ns=duration_ns,
            )  # fmt: skip
        return edit.apply("all-reduces by the dimensions of the grid")

    def apply(self, built: BuiltWorkload) -> None:
        """Put the hook on a model that is in DDP already.

        Raises:
            WorkloadError: it is not, it has a hook, or nobody said how many rows there are.
            InvalidArgumentError: the processes do not make so many rows.
        """
        from slipstream.techniques.distributed.collectives.two_d import TwoDState, two_d_hook
        from slipstream.techniques.distributed.exposed import put_hook

        model = self.need_hookless(built)
        if not self.rows:
            raise WorkloadError(
                "two_d_allreduce:rows is not given, and processes do not say how they are joined",
                remedy="the number of hosts or racks, as two_d_allreduce:2",
            )
        state = TwoDState(self.rows)
        put_hook(model, functools.partial(two_d_hook, state), state.ranks)

    def code(self, workload: Workload) -> CodeChange | None:
        """One line after the model is in DDP, to be placed by hand."""
        rows = self.rows or "HOSTS"
        return CodeChange(
            "",
            "after model = DistributedDataParallel(model), by hand:\n"
            f"    state = slipstream.distributed.TwoDState(rows={rows})\n"
            "    model.register_comm_hook(state, slipstream.distributed.two_d_hook)",
        )

    def _grid(self, group: Group) -> Group:
        if not self.rows:
            return group
        shape = (self.rows, group.ranks // self.rows)
        return Group.of(group.members.reshape(-1), shape)
