"""gelu: the other formula of GELU, where it is faster on this machine.

Source: Hendrycks and Gimpel, "Gaussian Error Linear Units (GELUs)", 2016, section 2, for both;
``torch.nn.GELU(approximate=...)``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from slipstream.durations import required_timings, rescale
from slipstream.errors import WorkloadError
from slipstream.graph import Call, Editor, Graph
from slipstream.technique import (
    CodeChange,
    Context,
    Quality,
    QualityKind,
    Stage,
    TechniqueSettings,
    Traits,
)

if TYPE_CHECKING:
    from slipstream.workload import BuiltWorkload, Workload

_OPERATORS = ("aten::gelu", "aten::gelu_backward")


@dataclass(frozen=True)
class Gelu(TechniqueSettings):
    """Every ``nn.GELU`` by ``erf``, which is the function itself, or by ``tanh``."""

    form: Literal["erf", "tanh"] = "erf"

    name: ClassVar[str] = "gelu"
    traits: ClassVar[Traits] = Traits(stage=Stage.MODEL, variants=("gelu:erf", "gelu:tanh"))

    def why_not(self, graph: Graph, workload: Workload | None = None) -> str | None:
        """Return why no module would change, or None."""
        if "GELU" not in graph.meta.get("modules", {}).values():
            return "the model has no nn.GELU; where it calls gelu() itself, edit that call"
        if not self._changed(graph):
            return f"its GELU is computed by {self.form} already"
        return None

    def required_timings(self, graph: Graph) -> Sequence[Call]:
        """Return each recorded GELU, and the same with the other formula."""
        return required_timings(graph, self._changed(graph))

    def predict(self, graph: Graph, context: Context) -> Graph:
        """Scale each GELU by the ratio of the two formulas on its shapes."""
        changed = self._changed(graph)
        edit = Editor(graph, str(self))
        rescale(edit, graph, changed, context.durations)
        return edit.apply(f"{len(changed)} GELU operators by {self.form}")

    def apply(self, built: BuiltWorkload) -> None:
        """Set the formula of the modules.

        Raises:
            WorkloadError: the step hides its model, or the model has no ``nn.GELU``.
        """
        from torch import nn

        if built.model is None:
            raise WorkloadError(
                "gelu needs the model, and this workload's step hides it",
                remedy="return (model, batch, loss, optimizer)",
            )
        found = [module for module in built.model.modules() if isinstance(module, nn.GELU)]
        if not found:
            raise WorkloadError(
                "the model has no nn.GELU", remedy="where it calls gelu() itself, edit that call"
            )
        for module in found:
            module.approximate = self._approximate

    def quality(self, graph: Graph | None = None) -> Quality:
        """Small differences in every activation, as from rounding to 16 bits."""
        return Quality(QualityKind.ROUNDING, "the two formulas differ by less than 0.0005")

    def code(self, workload: Workload) -> CodeChange | None:
        """The keyword where the module is made."""
        value = f'"{self._approximate}"'
        return CodeChange.of(
            workload,
            lambda where: where.set_call("torch.nn.GELU", approximate=value),
            by_hand=f"nn.GELU(approximate={value})",
        )

    @property
    def _approximate(self) -> str:
        """The formula's name in torch."""
        return "tanh" if self.form == "tanh" else "none"

    def _changed(self, graph: Graph) -> dict[int, Call]:
        """Return the new call of each task of a module, since `apply` changes only modules."""
        classes = graph.meta.get("modules", {})
        changed = {}
        for number in range(len(graph)):
            task = graph.task(number)
            call = task.call
            if call is None or call.name not in _OPERATORS:
                continue
            if classes.get(task.module) == "GELU" and call.arguments[-1] != self._approximate:
                arguments = (*call.arguments[:-1], self._approximate)
                changed[number] = Call(call.op, arguments, call.outputs)
        return changed
