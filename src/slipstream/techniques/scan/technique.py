"""scan: ``nn.RNN``, ``nn.GRU`` and ``nn.LSTM`` with all steps of a layer in one call.

Source: Wang et al., "BPPSA: Scaling Back-propagation by Parallel Scan Algorithm", MLSys 2020.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from slipstream.errors import WorkloadError
from slipstream.graph import (
    ITEM_BYTES,
    Call,
    Editor,
    Graph,
    Price,
    Role,
    StepPhase,
    price,
)
from slipstream.graph.flow import Flow, Match, flow_of, matches
from slipstream.native import library, why_no_library
from slipstream.source import AlreadyThereError, NotPlacedError, Places, Source, locate
from slipstream.technique import Choosing, CodeChange, Context, Quality, QualityKind, Stage, Traits
from slipstream.techniques._baseline import already_autocast, already_compiled
from slipstream.techniques.scan import MARGIN
from slipstream.techniques.scan.timing import layer_call
from slipstream.workload import BuiltWorkload, Workload

_KINDS = {
    "aten::rnn_tanh": "tanh", "aten::rnn_relu": "relu", "aten::gru": "gru", "aten::lstm": "lstm",
}  # fmt: skip
_GATES = {"tanh": 1, "relu": 1, "gru": 3, "lstm": 4}
# Of each kind, what its backward pass reads beside the states, in states.
_KEPT = {"tanh": 0, "relu": 0, "gru": 4, "lstm": 5}
_FUSED_LAYER = "aten::mkldnn_rnn_layer"
_NAMES = ("RNN", "GRU", "LSTM")
_BY_HAND = "import slipstream.nn\nself.lstm = slipstream.nn.LSTM(64, 128)  # or RNN, GRU"
_NONE = "no nn.RNN, nn.GRU or nn.LSTM runs in this step"


@dataclass(frozen=True)
class ScanBackprop(Choosing):
    """Every recurrent module of the model with all steps of a layer in one call.

    Attributes:
        backward: how gradients are computed, see `slipstream.scan.rnn`.
        only, except_: patterns of modules' qualified names.
    """

    backward: Literal["auto", "fused", "chunked", "tree"] = "auto"
    only: str = "*"
    except_: str = ""

    name: ClassVar[str] = "scan"
    traits: ClassVar[Traits] = Traits(stage=Stage.MODEL)
    effect: ClassVar[Quality] = Quality(
        QualityKind.ROUNDING, "the same sums in another order; Wang et al. 2020"
    )

    def why_not(self, graph: Graph, workload: Workload | None = None) -> str | None:
        """None, or why no recurrence of the step can be exchanged."""
        for reason in (already_compiled(graph), already_autocast(graph)):
            if reason is not None:
                return reason
        if (reason := self.why_none_of(matches(graph, recurrences), _NONE)) is not None:
            return reason
        if library() is None:
            return f"it needs the compiled library: {why_no_library()}"
        return None

    def required_timings(self, graph: Graph) -> Sequence[Call]:
        """Each layer forward and backward."""
        return [
            call
            for recurrence in self.chosen(matches(graph, recurrences))
            for backward in (False, True)
            for call in recurrence.calls(backward)
        ]

    def predict(self, graph: Graph, context: Context) -> Graph:
        """One task in place of each module's forward operators, one in that of its backward.

        A module stays as it was where that is not shorter: `auto` leaves it to torch.
        """
        edit = Editor(graph, str(self))
        changed = removed = 0
        for one in self.chosen(matches(graph, recurrences)):
            # Not at the step's pace: that of thousands of small operators is none of one loop's.
            prices = [
                price(context.durations, one.calls(backward), _sum_ns(graph, tasks))
                for backward, tasks in ((False, one.forward), (True, one.backward))
            ]
            before_ns = _sum_ns(graph, one.tasks)
            if self.backward == "auto" and sum(p.nanoseconds for p in prices) >= MARGIN * before_ns:
                continue
            handle = _put(edit, graph, one.forward, prices[0])
            if one.backward:
                last = _put(edit, graph, one.backward, prices[1])
                _hold(edit, graph, one, handle, last)
            changed += 1
            removed += len(one.tasks)
        return edit.apply(f"{removed} operators of {changed} recurrent modules in one call a layer")

    def apply(self, built: BuiltWorkload) -> None:
        """Make every ``nn.RNN``, ``nn.GRU`` and ``nn.LSTM`` of the model ours.

        Modules stay the objects they are, with their parameters, names and hooks.

        Raises:
            WorkloadError: the step hides its model, or the model has none of them.
        """
        from slipstream.techniques.scan.nn import CLASSES

        built.need_model(self.name)
        modules = {n: m for n, m in built.model.named_modules() if type(m) in CLASSES}
        if not modules:
            raise WorkloadError(
                "the model has no nn.RNN, nn.GRU or nn.LSTM",
                remedy="slipstream.scan.rnn(cell, x) runs a cell over all steps",
            )
        self.need_some(modules)
        for name, module in modules.items():
            if name in self.selection:
                module.__class__ = CLASSES[type(module)]
                module.backward_as = self.backward

    def code(self, workload: Workload) -> CodeChange | None:
        """``slipstream.nn.LSTM`` where the file makes an ``nn.LSTM``, and so with the others."""
        if not self.selection.everything:
            return CodeChange("", f"for the modules you mean, by hand:\n{_BY_HAND}")
        return CodeChange.of(workload, _edit, by_hand=_BY_HAND)


def _edit(where: Places) -> Source:
    edited: Source | None = None
    name = None if where.function is None else where.function.name
    reasons: list[NotPlacedError | AlreadyThereError] = []
    for one in _NAMES:
        try:
            edited = where.replace_class(f"torch.nn.{one}", f"slipstream.nn.{one}")
        except (NotPlacedError, AlreadyThereError) as reason:
            reasons.append(reason)
        else:
            where = locate(edited, name)
    if edited is None:
        raise next((one for one in reasons if isinstance(one, AlreadyThereError)), reasons[0])
    return edited


@dataclass(frozen=True)
class RecordedDirection:
    """One direction of a layer, as it was recorded."""

    kind: str
    steps: int
    batch: int
    inputs: int
    hidden: int
    dtype: str


@dataclass(frozen=True, eq=False)
class Recurrence(Match):
    """What one recurrent module does in the step; `settings` is every direction of every layer."""

    settings: tuple[RecordedDirection, ...] = ()

    @property
    def kept_bytes(self) -> int:
        """What the backward pass reads beside the module's output."""
        total = 0
        for number, one in enumerate(self.settings):
            states = _KEPT[one.kind] + (number + 1 < len(self.settings))
            total += one.steps * one.batch * one.hidden * states * ITEM_BYTES.get(one.dtype, 4)
        return total

    @property
    def passing_bytes(self) -> int:
        """What the backward pass of the largest layer makes and frees.

        Gradients of its gates, of what it is given and of what it gave, the last of these in the
        order of the kernel, too.
        """
        return max(
            one.steps * one.batch * one.hidden * (_GATES[one.kind] + 3)
            * ITEM_BYTES.get(one.dtype, 4)
            for one in self.settings
        )  # fmt: skip

    def calls(self, backward: bool) -> list[Call]:
        """Every layer's pass, as the micro-benchmark times it; none of a pass not in the step."""
        if backward and not self.backward:
            return []
        return [
            layer_call(
                one.kind, one.steps, one.batch, one.inputs, one.hidden, one.dtype, backward,
                bool(self.backward),
            )
            for one in self.settings
        ]  # fmt: skip


def recurrences(flow: Flow) -> Iterator[Recurrence]:
    """Find what every recurrent module does."""
    graph, column = flow.graph, flow.graph.tasks
    roots = [text.partition("/")[0] for text in graph.strings]
    recurrent = np.array([root in _KINDS for root in roots], bool)[column.scope]
    inside = recurrent & (column.call >= 0) & (column.phase == StepPhase.FORWARD)
    forward: dict[tuple[str, str], list[int]] = {}
    for task in np.flatnonzero(inside).tolist():
        key = graph.string(column.module[task]), roots[column.scope[task]]
        forward.setdefault(key, []).append(task)
    for (module, root), tasks in forward.items():
        backward = sorted(
            back for task in tasks for back in flow.backward[task] if column.call[back] >= 0
        )
        first, last = (graph.calls[column.call[task]] for task in (tasks[0], tasks[-1]))
        tensors = (*first.inputs, *first.outputs, *last.inputs, *last.outputs)
        names = graph.texts("name", np.array([*tasks, *backward]))
        layers: tuple[RecordedDirection, ...] = ()
        refusal: str | None
        # An edit gave the task another call, or tensors of which the storages are unknown.
        if names != [flow.name(task) for task in (*tasks, *backward)]:
            refusal = f"the layers of {module or 'the step'} are another technique's already"
        else:
            layers = tuple(_layers(graph, _KINDS[root], tasks))
            refusal = _refusal(layers, module)
        if tensors:
            yield Recurrence(
                "recurrence", module.partition(".")[2], tuple(tasks), tuple(backward), tensors[0],
                tensors[-1], {}, layers, refusal,
            )  # fmt: skip


def _refusal(layers: Sequence[RecordedDirection], module: str) -> str | None:
    if not layers:
        return f"the recurrence of {module or 'the step'} is of packed sequences, or projected"
    if any(one.dtype not in ("float32", "float64") for one in layers):
        return f"{module} computes in {layers[0].dtype}; the kernels do in float32 and float64"
    return None


def _layers(graph: Graph, kind: str, tasks: Sequence[int]) -> Iterable[RecordedDirection]:
    """What the module's operators say of its layers."""
    for place, task in enumerate(tasks):
        view = graph.task(task)
        inputs = view.known_call.inputs
        if view.name == _FUSED_LAYER:
            x, weight = inputs[0], inputs[2]
            yield RecordedDirection(
                kind, x.shape[0], x.shape[1], x.shape[2], weight.shape[1], x.dtype
            )
        elif view.name == "aten::unbind" and inputs and len(inputs[0].shape) == 3:
            steps, batch, wide = inputs[0].shape
            product = next((p for p in reversed(tasks[:place]) if _is_product(graph, p)), None)
            # The states' own unbind comes before any product.
            if product is None or wide % _GATES[kind]:
                continue
            of_input = graph.task(product).known_call.inputs[-2]
            if math.prod(of_input.shape[:-1]) == steps * batch:
                width = of_input.shape[-1]
                yield RecordedDirection(
                    kind, steps, batch, width, wide // _GATES[kind], inputs[0].dtype
                )


def _is_product(graph: Graph, task: int) -> bool:
    return graph.task(task).name in ("aten::mm", "aten::addmm", "aten::bmm")


def _sum_ns(graph: Graph, tasks: Sequence[int]) -> float:
    chosen = list(tasks)
    return float((graph.tasks.duration_ns[chosen] + graph.tasks.gap_ns[chosen]).sum())


def _put(edit: Editor, graph: Graph, tasks: Sequence[int], cost: Price) -> int:
    """One task in the place of `tasks`, that reads and writes what they did for others."""
    inputs, outputs = flow_of(graph).boundary(tasks)
    call = Call("slipstream::scan_layers()", tuple(inputs.values()), tuple(outputs.values()))
    handle = edit.put(
        tasks[-1], call, cost, gap_ns=graph.task(tasks[-1]).gap_ns,
        storages=[*inputs, *outputs], sequence=graph.task(tasks[0]).sequence,
    )  # fmt: skip
    edit.remove(np.array(tasks))
    return handle


def _hold(edit: Editor, graph: Graph, one: Recurrence, forward: int, backward: int) -> None:
    """The memory of a module whose passes are the tasks `forward` and `backward`."""
    edit.allocate(one.passing_bytes, Role.TEMPORARY, backward, backward)
    if one.kept_bytes:
        edit.allocate(one.kept_bytes, Role.ACTIVATION, forward, backward)
    # The backward pass reads what the module gave, too.
    gave = np.isin(graph.memory.producer, one.forward)
    gave &= np.isin(graph.memory.storage, list(flow_of(graph).boundary(one.forward)[1]))
    early = (graph.memory.release >= 0) & (graph.memory.release < one.backward[-1])
    edit.release_after(np.flatnonzero(gave & early), backward)
