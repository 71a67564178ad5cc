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
from slipstream.graph.graph import kept
from slipstream.technique import Choosing, CodeChange, Context, Quality, QualityKind, Stage, Traits
from slipstream.techniques._baseline import already_compiled
from slipstream.techniques.lowrank.recorded import LowRankPlan, asked, edited, rank_of, sites

if TYPE_CHECKING:
    from slipstream.workload import BuiltWorkload, Workload

# Looks of the automatic mode at ranks, over the steps that are planned.
_LOOKS = 40


@dataclass(frozen=True)
class LowRank(Choosing):
    """Layers of `ratio` times their full rank, but the first and the last.

    Attributes:
        ratio: share of the full rank, over 0 to 1.
        rank: the same rank for all layers, in place of `ratio`.
        warmup: share of the training that is dense before; a step by itself is taken as after it.
        auto: choose ranks by layer, and the moment of the switch, from how weights' spectra settle.
        ends: whether the first and the last layer become products, too.
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
                "lowrank:ratio", f"{self.ratio:g} is no share of the full rank", remedy="0 < r <= 1"
            )
        if self.rank is not None and self.rank < 1:
            raise InvalidArgumentError("lowrank:rank", f"{self.rank} is less than 1")
        if not 0 <= self.warmup < 1:
            raise InvalidArgumentError(
                "lowrank:warmup", f"{self.warmup:g} is no share of the training",
                remedy="for example lowrank:0.25,warmup=0.2",
            )  # fmt: skip

    def why_not(self, graph: Graph, workload: Workload | None = None) -> str | None:
        """None, or why no layer has fewer numbers as a product."""
        if (reason := already_compiled(graph)) is not None:
            return reason
        if not (graph.tasks.phase == StepPhase.BACKWARD).any():
            return "the step does not train, and a product of thin matrices has to be trained"
        every = matches(graph, sites)
        none = "the step has no linear layer, convolution or LSTM"
        if (reason := self.why_none_of(every, none)) is not None:
            return reason
        if not _products(graph, self).sites:
            return (
                f"none of its {len(every)} layers has fewer numbers as a product of "
                f"{'this rank' if self.rank is None else f'rank {self.rank}'}, "
                "but for the first and the last, which stay dense"
            )
        return None

    def required_timings(self, graph: Graph) -> Sequence[Call]:
        """Operators as they are and as they would be."""
        return asked(graph, _products(graph, self))

    def predict(self, graph: Graph, context: Context) -> Graph:
        """Two operators for one, smaller updates, gradients and memory."""
        plan = _products(graph, self)
        chosen = plan.sites
        edit = Editor(graph, str(self))
        edited(edit, graph, plan, context)
        before = sum(spec.numel for one in chosen for spec in one.weights.values())
        after = sum(one.numbers(storage) for one in chosen for storage in one.weights)
        return edit.apply(
            f"{len(chosen)} weights of {before:,} numbers as products of {after:,}"
            + " once it is warm" * bool(self.warmup or self.auto)
        )

    def apply(self, built: BuiltWorkload) -> None:
        """Exchange the layers now, or once the dense share of the planned steps is over.

        Raises:
            WorkloadError: the step hides its model or does not train, or no layer can be exchanged.
        """
        built.need_model(self.name)
        if not built.training:
            raise WorkloadError("lowrank is for training", remedy="(model, batch, loss, optimizer)")
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
        """Exchange the layers of what was built, whatever is around its model.

        Args:
            ranks: by layer; those of the settings where None.
            warm: whether its weights are trained, and not drawn a moment ago.
        """
        from slipstream.techniques.lowrank.factors import Start
        from slipstream.techniques.lowrank.layers import factorize, switch

        def change(model: Any) -> None:
            factorize(
                model, ranks or self._wanted, optimizer=built.optimizer, keep=self._keep,
                only=self.only, except_=self.except_, start=Start(keep_norm=not warm),
            )  # fmt: skip

        built.model = switch(built.model, change)

    def _check(self, model: Any) -> None:
        """See that names and ranks are right before the dense phase, not after it.

        Raises:
            WorkloadError: no layer has such a name.
            InvalidArgumentError: a named layer cannot have its rank.
        """
        from slipstream.techniques.lowrank.layers import plan

        plan(model, self._wanted, keep=self._keep, only=self.only, except_=self.except_)

    def quality(self, graph: Graph | None = None) -> Quality:
        """Another model."""
        return Quality(
            QualityKind.NEEDS_TRAINING,
            "Wang et al. 2021: within 0.3 points of the dense model's accuracy at a quarter of the "
            "rank, with the first and last layers dense and after a dense warm-up; lost without",
            "" if self.warmup or self.auto else "warmup=0.2 begins dense",
        )

    def code(self, workload: Workload) -> CodeChange | None:
        """The exchange before the model is returned."""
        settings = ', keep="none"' * self.ends
        for key, value in (("only", self.only), ("except_", self.except_)):
            if value != getattr(type(self), key):
                settings += f', {key}="{value}"'
        settings = f"{self._wanted}{settings}"
        lines = ("import slipstream", f"slipstream.lowrank.factorize({{model}}, {settings})")
        return CodeChange.of(
            workload,
            lambda where: where.after_model(*lines),
            by_hand="\n".join(lines).format(model="model"),
            note="to begin dense, call it once a fifth of the training is done, with "
            "optimizer=optimizer; in DistributedDataParallel through slipstream.lowrank.switch",
        )

    @property
    def _wanted(self) -> float | int:
        return self.ratio if self.rank is None else self.rank

    @property
    def _keep(self) -> Literal["ends", "none"]:
        return "none" if self.ends else "ends"


@kept
def _products(graph: Graph, settings: LowRank) -> LowRankPlan:
    """Sites that become products, with what becomes of their tasks."""
    every = matches(graph, sites)
    ends = {one.module for one in (every[0], every[-1])} if len(every) > 2 else {
        every[-1].module
    } if every else set()  # fmt: skip
    chosen = []
    for site in settings.chosen(every):
        if not settings.ends and (site.module in ends or site.shortcut):
            continue
        ranks = rank_of(site, settings.ratio, settings.rank)
        if ranks is None:
            continue
        site = replace(site, ranks=ranks)
        if sum(map(site.numbers, site.weights)) >= sum(
            spec.numel for spec in site.weights.values()
        ):
            continue
        chosen.append(site)
    return LowRankPlan.of(graph, chosen)


class _Schedule:
    """Counts the optimizer's steps of a training and switches when the dense phase is over."""

    def __init__(self, technique: LowRank, built: BuiltWorkload) -> None:
        from slipstream.techniques.lowrank.monitor import RankMonitor

        self._technique, self._built = technique, built
        self._taken = 0
        share = technique.warmup or 0.5
        self._latest = max(1, int(share * built.planned_steps))
        self._every = max(1, built.planned_steps // _LOOKS)
        self._monitor = RankMonitor(built.model) if technique.auto else None
        self._hook = built.optimizer.register_step_post_hook(self._after_step)

    def _after_step(self, *ignored: object) -> None:
        from slipstream.techniques.lowrank.layers import need_hookless

        self._taken += 1
        if self._taken == 1:
            need_hookless(self._built.model)
        monitor = self._monitor
        settled = False
        if monitor is not None and self._taken % self._every == 0:
            monitor.look()
            settled = monitor.settled
        if self._taken < self._latest and not settled:
            return
        self._hook.remove()
        ranks = None if monitor is None else _worthwhile(monitor.ranks, self._built.model)
        self._technique.factorize(self._built, ranks, warm=True)


def _worthwhile(ranks: dict[str, int], model: Any) -> dict[str, int] | None:
    """Those of the automatic ranks at which a layer shrinks; None where none does."""
    from slipstream.techniques.lowrank.layers import candidates, matrices

    every = candidates(model)
    layers = dict(every[1:-1])
    shrinking = {}
    for name, rank in ranks.items():
        if name not in layers:
            continue
        rows, columns = matrices(layers[name])[0]
        if rank * (rows + columns) < rows * columns:
            shrinking[name] = rank
    return shrinking or None
