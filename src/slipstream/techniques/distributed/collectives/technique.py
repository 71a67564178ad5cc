"""All-reduce along the dimensions of a grid of workers.

On an x by y grid a bucket of S bytes is reduce-scattered along y, all-reduced along x with S/y
bytes per worker, and all-gathered along y: the slower dimension carries 1/y of the bytes, and the
latency grows with x + y instead of x y. Source: Kumar et al., MLSys 2021, arXiv 2011.03641.
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
    """All-reduce along `rows` rows of workers, then columns; 0 uses the cluster's dimensions."""

    rows: int = 0

    name: ClassVar[str] = "two_d_allreduce"
    traits: ClassVar[Traits] = replace(ON_REPLICAS, stage=Stage.DISTRIBUTION + 2)

    def __post_init__(self) -> None:
        if self.rows < 0:
            raise InvalidArgumentError(
                "two_d_allreduce:rows",
                f"{self.rows} is negative",
                remedy="for example two_d_allreduce:8",
            )

    def why_not(self, graph: Graph, workload: Workload | None = None) -> str | None:
        """Return why the workers form no grid; None if they do."""
        if (reason := self.why_no_replicas(graph)) is not None:
            return reason
        for row in all_reduces(graph):
            group = row.collective.group
            if self.rows and row.ranks % self.rows:
                return f"{row.ranks} workers cannot be split into {self.rows} rows"
            if not self.rows and (group is None or len(group.shape) < 2):
                return "the workers form no grid on this cluster; set rows, for example :rows=4"
        return None

    def predict(self, graph: Graph, context: Context) -> Graph:
        """Replace every all-reduce by one along the dimensions of the grid."""
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
        return edit.apply("all-reduces along the dimensions of the grid")

    def apply(self, built: BuiltWorkload) -> None:
        """Register the hook on a model that DistributedDataParallel already wraps.

        Raises:
            WorkloadError: the model is not wrapped or already has a hook, or `rows` is 0.
            InvalidArgumentError: `rows` does not divide the number of processes.
        """
        from slipstream.techniques.distributed.collectives.two_d import TwoDState, two_d_hook
        from slipstream.techniques.distributed.exposed import put_hook

        model = self.need_hookless(built)
        if not self.rows:
            raise WorkloadError(
                "two_d_allreduce:rows is not set, and processes do not know their network topology",
                remedy="pass the number of hosts or racks, for example two_d_allreduce:2",
            )
        state = TwoDState(self.rows)
        put_hook(model, functools.partial(two_d_hook, state), state.ranks)

    def code(self, workload: Workload) -> CodeChange | None:
        """Return a manual step: register the hook after wrapping the model in DDP."""
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
