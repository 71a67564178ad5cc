"""lowrank: weights as products of two thin matrices for most of the training.

Fewer bytes of gradients, fewer operations, less optimizer state and a smaller model, with ordinary
all-reduce. Source: Wang, Agarwal and Papailiopoulos, "Pufferfish: Communication-efficient Models At
No Extra Cost", MLSys 2021; the automatic mode: Wang et al., "Cuttlefish", MLSys 2023.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from slipstream.errors import InvalidArgumentError, WorkloadError
from slipstream.graph import Call, Editor, Graph, StepPhase
from slipstream.graph.flow import matches
from slipstream.graph.graph import cached_per_graph
from slipstream.technique import (
    CodeChange,
    Context,
    ModuleTechnique,
    Quality,
    QualityKind,
    Stage,
    Traits,
)
from slipstream.techniques._baseline import already_compiled
from slipstream.techniques.lowrank.recorded import (
    LowRankPlan,
    insert_products,
    rank_of,
    required_calls,
    sites,
)

if TYPE_CHECKING:
    from slipstream.workload import BuiltWorkload, Workload

# Rank measurements of the automatic mode over the planned steps.
_MEASUREMENTS = 40


@dataclass(frozen=True)
class LowRank(ModuleTechnique):
    """Factorization of layers to `ratio` times their full rank, except the first and the last.

    Attributes:
        ratio: share of the full rank, above 0, at most 1.
        rank: rank for all layers, overriding `ratio`.
        warmup: share of the training that stays dense first; a single step is assumed to be later.
        auto: choose the ranks and the time of the switch from the weights' spectra.
        ends: whether to replace the first and the last layer too.
        only, except_: patterns of modules' qualified names.
    """

    ratio: float = 0.25
    rank: int | None = None
    warmup: float = 0.0
    auto: bool = False
    ends: bool = False
    only: str = "*"
    except_: str = ""

    name: ClassVar[str] = "lowrank"
    traits: ClassVar[Traits] = Traits(
        stage=Stage.MODEL,
        conflicts=frozenset({"lowbit"}),
        variants=("lowrank:0.25", "lowrank:0.125"),
    )

    def __post_init__(self) -> None:
        if not 0 < self.ratio <= 1:
            raise InvalidArgumentError(
                "lowrank:ratio",
                f"{self.ratio:g} is not a share of the full rank",
                remedy="0 < r <= 1",
            )
        if self.rank is not None and self.rank < 1:
            raise InvalidArgumentError("lowrank:rank", f"{self.rank} is less than 1")
        if not 0 <= self.warmup < 1:
            raise InvalidArgumentError(
                "lowrank:warmup", f"{self.warmup:g} is not a share of the training",
                remedy="for example lowrank:0.25,warmup=0.2",
            )  # fmt: skip

    def why_not(self, graph: Graph, workload: Workload | None = None) -> str | None:
        """Return why no layer has fewer parameters as a product; None if one has."""
        if (reason := already_compiled(graph)) is not None:
            return reason
        if not (graph.tasks.phase == StepPhase.BACKWARD).any():
            return "the step does not train, and low-rank products have to be trained"
        candidates = matches(graph, sites)
        missing = "the step has no linear layer, convolution or LSTM"
        if (reason := self.no_match_reason(candidates, missing)) is not None:
            return reason
        if not _products(graph, self).sites:
            return (
                f"none of its {len(candidates)} layers has fewer parameters as a product of "
                f"{'this rank' if self.rank is None else f'rank {self.rank}'}, "
                "except the first and the last, which stay dense"
            )
        return None

    def required_timings(self, graph: Graph) -> Sequence[Call]:
        """Return the recorded and the new operators."""
        return required_calls(graph, _products(graph, self))

    def predict(self, graph: Graph, context: Context) -> Graph:
        """Replace each operator by two, and reduce updates, gradients and memory."""
        plan = _products(graph, self)
        chosen = plan.sites
        edit = Editor(graph, str(self))
        insert_products(edit, graph, plan, context)
        before = sum(spec.numel for site in chosen for spec in site.weights.values())
        after = sum(site.parameters(storage) for site in chosen for storage in site.weights)
        return edit.apply(
            f"{len(chosen)} weights of {before:,} parameters as products of {after:,}"
            + " after the warm-up" * bool(self.warmup or self.auto)
        )

    def apply(self, built: BuiltWorkload) -> None:
        """Replace the layers now, or after the dense share of the planned steps.

        Raises:
            WorkloadError: the step hides its model or does not train, or no layer can be replaced.
        """
        built.need_model(self.name)
        if not built.training:
            raise WorkloadError(
                "lowrank needs a training step", remedy="return (model, batch, loss, optimizer)"
            )
        try:
            self._check(built.model)
            if built.planned_steps and (self.warmup or self.auto):
                _Schedule(self, built)
            else:
                self.factorize(built)
        except InvalidArgumentError as error:
            raise WorkloadError(
                f"lowrank: {error.what}", where=error.where, remedy=error.remedy
            ) from error

    def factorize(
        self, built: BuiltWorkload, ranks: dict[str, int] | None = None, *, warm: bool = False
    ) -> None:
        """Replace the layers of `built`, whose model may be wrapped.

        Args:
            ranks: ranks by layer; those of the settings if None.
            warm: whether the weights are trained, not freshly initialised.
        """
        from slipstream.techniques.lowrank.factors import Start
        from slipstream.techniques.lowrank.layers import factorize, switch

        def change(model: Any) -> None:
            factorize(
                model, ranks or self._requested, optimizer=built.optimizer, keep=self._keep,
                only=self.only, except_=self.except_, start=Start(keep_norm=not warm),
            )  # fmt: skip

        built.model = switch(built.model, change)

    def _check(self, model: Any) -> None:
        """Validate names and ranks before the dense phase.

        Raises:
            WorkloadError: no layer is selected.
            InvalidArgumentError: a rank is invalid for its layer.
        """
        from slipstream.techniques.lowrank.layers import plan

        plan(model, self._requested, keep=self._keep, only=self.only, except_=self.except_)

    def quality(self, graph: Graph | None = None) -> Quality:
        """Require training, since weights become low-rank products."""
        return Quality(
            QualityKind.NEEDS_TRAINING,
            "Wang et al. 2021: within 0.3 points of the dense model's accuracy at a quarter of the "
            "rank, with the first and last layers dense and after a dense warm-up; lower without",
            "" if self.warmup or self.auto else "warmup=0.2 starts dense",
        )

    def code(self, workload: Workload) -> CodeChange | None:
        """Return the replacement of layers before the model is returned."""
        settings = ', keep="none"' * self.ends
        for key, value in (("only", self.only), ("except_", self.except_)):
            if value != getattr(type(self), key):
                settings += f', {key}="{value}"'
        settings = f"{self._requested}{settings}"
        lines = ("import slipstream", f"slipstream.lowrank.factorize({{model}}, {settings})")
        return CodeChange.of(
            workload,
            lambda where: where.after_model(*lines),
            by_hand="\n".join(lines).format(model="model"),
            note="to start dense, call it after a fifth of the training with optimizer=optimizer; "
            "in DistributedDataParallel use slipstream.lowrank.switch",
        )

    @property
    def _requested(self) -> float | int:
        return self.ratio if self.rank is None else self.rank

    @property
    def _keep(self) -> Literal["ends", "none"]:
        return "none" if self.ends else "ends"


@cached_per_graph
def _products(graph: Graph, settings: LowRank) -> LowRankPlan:
    """Return the sites that become products, with the replacements of their tasks."""
    candidates = matches(graph, sites)
    outer = (candidates[0], candidates[-1]) if len(candidates) > 2 else candidates[-1:]
    ends = {site.module for site in outer}
    chosen = []
    for site in settings.chosen(candidates):
        if not settings.ends and (site.module in ends or site.shortcut):
            continue
        ranks = rank_of(site, settings.ratio, settings.rank)
        if ranks is None:
            continue
        site = replace(site, ranks=ranks)
        if sum(map(site.parameters, site.weights)) >= sum(
            spec.numel for spec in site.weights.values()
        ):
            continue
        chosen.append(site)
    return LowRankPlan.of(graph, chosen)


class _Schedule:
    """Counter of optimizer steps that replaces the layers at the end of the dense phase."""

    def __init__(self, technique: LowRank, built: BuiltWorkload) -> None:
        from slipstream.techniques.lowrank.monitor import RankMonitor

        self._technique, self._built = technique, built
        self._steps_done = 0
        share = technique.warmup or 0.5
        self._max_dense_steps = max(1, int(share * built.planned_steps))
        self._interval = max(1, built.planned_steps // _MEASUREMENTS)
        self._monitor = RankMonitor(built.model) if technique.auto else None
        self._hook = built.optimizer.register_step_post_hook(self._after_step)

    def _after_step(self, *ignored: object) -> None:
        from slipstream.techniques.lowrank.layers import need_hookless

        self._steps_done += 1
        if self._steps_done == 1:
            need_hookless(self._built.model)
        monitor = self._monitor
        converged = False
        if monitor is not None and self._steps_done % self._interval == 0:
            monitor.measure()
            converged = monitor.has_converged
        if self._steps_done < self._max_dense_steps and not converged:
            return
        self._hook.remove()
        ranks = None if monitor is None else _worthwhile(monitor.ranks, self._built.model)
        self._technique.factorize(self._built, ranks, warm=True)


def _worthwhile(ranks: dict[str, int], model: Any) -> dict[str, int] | None:
    """Return the automatic ranks at which layers shrink; None if none does."""
    from slipstream.techniques.lowrank.layers import candidates, matrices

    layers = dict(candidates(model)[1:-1])
    shrinking = {}
    for name, rank in ranks.items():
        if name not in layers:
            continue
        rows, columns = matrices(layers[name])[0]
        if rank * (rows + columns) < rows * columns:
            shrinking[name] = rank
    return shrinking or None
