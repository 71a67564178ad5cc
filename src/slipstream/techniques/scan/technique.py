"""scan: run all steps of a layer of ``nn.RNN``, ``nn.GRU`` and ``nn.LSTM`` in one call.

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
from slipstream.source import AlreadyAppliedError, EditLocationError, Places, Source, locate
from slipstream.technique import (
    CodeChange,
    Context,
    ModuleTechnique,
    Quality,
    QualityKind,
    Stage,
    Traits,
)
from slipstream.techniques._baseline import already_autocast, already_compiled, hidden_model
from slipstream.techniques.scan import MARGIN
from slipstream.techniques.scan.timing import layer_call
from slipstream.workload import BuiltWorkload, Workload

_KINDS = {
    "aten::rnn_tanh": "tanh", "aten::rnn_relu": "relu", "aten::gru": "gru", "aten::lstm": "lstm",
}  # fmt: skip
_GATES = {"tanh": 1, "relu": 1, "gru": 3, "lstm": 4}
# Tensors saved for the backward pass next to the states, in multiples of the states' size.
_SAVED = {"tanh": 0, "relu": 0, "gru": 4, "lstm": 5}
_FUSED_LAYER = "aten::mkldnn_rnn_layer"
_CLASS_NAMES = ("RNN", "GRU", "LSTM")
_BY_HAND = "import slipstream.nn\nself.lstm = slipstream.nn.LSTM(64, 128)  # or RNN, GRU"
_NO_RECURRENCE = "no nn.RNN, nn.GRU or nn.LSTM runs in this step"


@dataclass(frozen=True)
class ScanBackprop(ModuleTechnique):
    """Technique that runs all steps of each recurrent layer in one call.

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
        """Return why no recurrence of the step can be replaced, or None."""
        for reason in (already_compiled(graph), already_autocast(graph), hidden_model(graph)):
            if reason is not None:
                return reason
        if (
            reason := self.no_match_reason(matches(graph, recurrences), _NO_RECURRENCE)
        ) is not None:
            return reason
        if library() is None:
            return f"the compiled library is missing: {why_no_library()}"
        return None

    def required_timings(self, graph: Graph) -> Sequence[Call]:
        """Return the forward and the backward pass of each layer."""
        return [
            call
            for recurrence in self.chosen(matches(graph, recurrences))
            for backward in (False, True)
            for call in recurrence.calls(backward)
        ]

    def predict(self, graph: Graph, context: Context) -> Graph:
        """Replace the operators of each module's passes by one task per pass.

        With ``backward=auto``, modules whose predicted time is not shorter are not changed.
        """
        edit = Editor(graph, str(self))
        changed = removed = 0
        for recurrence in self.chosen(matches(graph, recurrences)):
            # Without the step's scale factor: thousands of small operators do not predict one loop.
            prices = [
                price(context.durations, recurrence.calls(backward), _sum_ns(graph, tasks))
                for backward, tasks in ((False, recurrence.forward), (True, recurrence.backward))
            ]
            before_ns = _sum_ns(graph, recurrence.tasks)
            if self.backward == "auto" and sum(p.nanoseconds for p in prices) >= MARGIN * before_ns:
                continue
            handle = _replace(edit, graph, recurrence.forward, prices[0])
            if recurrence.backward:
                last = _replace(edit, graph, recurrence.backward, prices[1])
                _allocate(edit, graph, recurrence, handle, last)
            changed += 1
            removed += len(recurrence.tasks)
        return edit.apply(
            f"{removed} operators of {changed} recurrent modules replaced by one call per layer"
        )

    def apply(self, built: BuiltWorkload) -> None:
        """Change the class of every ``nn.RNN``, ``nn.GRU`` and ``nn.LSTM`` to that of `scan.nn`.

        Modules remain the same objects, with their parameters, names and hooks.

        Raises:
            WorkloadError: the step hides its model, or the model has no such module.
        """
        from slipstream.techniques.scan.nn import CLASSES

        built.need_model(self.name)
        modules = {n: m for n, m in built.model.named_modules() if type(m) in CLASSES}
        if not modules:
            raise WorkloadError(
                "the model has no nn.RNN, nn.GRU or nn.LSTM",
                remedy="to run a cell over all steps, call slipstream.scan.rnn(cell, x)",
            )
        self.require_match(modules)
        for name, module in modules.items():
            if name in self.selection:
                module.__class__ = CLASSES[type(module)]
                module.backward_as = self.backward

    def code(self, workload: Workload) -> CodeChange | None:
        """Return the edit that replaces ``nn.LSTM`` by ``slipstream.nn.LSTM``, and so on."""
        if not self.selection.everything:
            return CodeChange("", f"by hand, for the selected modules:\n{_BY_HAND}")
        return CodeChange.of(workload, _edit, by_hand=_BY_HAND)


def _edit(places: Places) -> Source:
    edited: Source | None = None
    name = None if places.function is None else places.function.name
    reasons: list[EditLocationError | AlreadyAppliedError] = []
    for class_name in _CLASS_NAMES:
        try:
            edited = places.replace_class(f"torch.nn.{class_name}", f"slipstream.nn.{class_name}")
        except (EditLocationError, AlreadyAppliedError) as reason:
            reasons.append(reason)
        else:
            places = locate(edited, name)
    if edited is None:
        raise next(
            (reason for reason in reasons if isinstance(reason, AlreadyAppliedError)), reasons[0]
        )
    return edited


@dataclass(frozen=True)
class RecordedDirection:
    """A recorded direction of a layer."""

    kind: str
    steps: int
    batch: int
    inputs: int
    hidden: int
    dtype: str


@dataclass(frozen=True, eq=False)
class Recurrence(Match):
    """Tasks of a recurrent module; `settings` lists every direction of every layer."""

    settings: tuple[RecordedDirection, ...] = ()

    @property
    def saved_bytes(self) -> int:
        """Bytes saved for the backward pass, without the module's output."""
        total = 0
        for number, layer in enumerate(self.settings):
            states = _SAVED[layer.kind] + (number + 1 < len(self.settings))
            total += (
                layer.steps * layer.batch * layer.hidden * states * ITEM_BYTES.get(layer.dtype, 4)
            )
        return total

    @property
    def temporary_bytes(self) -> int:
        """Bytes that the backward pass of the largest layer allocates and frees.

        These are gradients of its gates, its input and its output, and a copy of the latter in the
        kernel's layout.
        """
        return max(
            layer.steps * layer.batch * layer.hidden * (_GATES[layer.kind] + 3)
            * ITEM_BYTES.get(layer.dtype, 4)
            for layer in self.settings
        )  # fmt: skip

    def calls(self, backward: bool) -> list[Call]:
        """Return the micro-benchmark calls of all layers; empty if the step has no such pass."""
        if backward and not self.backward:
            return []
        return [
            layer_call(
                d.kind, d.steps, d.batch, d.inputs, d.hidden, d.dtype, backward,
                bool(self.backward),
            )
            for d in self.settings
        ]  # fmt: skip


def recurrences(flow: Flow) -> Iterator[Recurrence]:
    """Find the tasks of every recurrent module."""
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
        # Another edit replaced the tasks.
        if names != [flow.name(task) for task in (*tasks, *backward)]:
            refusal = f"another technique has already changed the layers of {module or 'the step'}"
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
        return f"the recurrence of {module or 'the step'} has packed sequences or a projection"
    if any(layer.dtype not in ("float32", "float64") for layer in layers):
        return f"{module} computes in {layers[0].dtype}; the kernels support float32 and float64"
    return None


def _layers(graph: Graph, kind: str, tasks: Sequence[int]) -> Iterable[RecordedDirection]:
    """Derive the module's layers from its operators."""
    for place, task in enumerate(tasks):
        view = graph.task(task)
        inputs = view.known_call.inputs
        if view.name == _FUSED_LAYER:
            x, weight = inputs[0], inputs[2]
            yield RecordedDirection(
                kind, x.shape[0], x.shape[1], x.shape[2], weight.shape[1], x.dtype
            )
        elif view.name == "aten::unbind" and inputs and len(inputs[0].shape) == 3:
            steps, batch, width = inputs[0].shape
            product = next((p for p in reversed(tasks[:place]) if _is_product(graph, p)), None)
            # The unbind of the states precedes any matmul.
            if product is None or width % _GATES[kind]:
                continue
            product_input = graph.task(product).known_call.inputs[-2]
            if math.prod(product_input.shape[:-1]) == steps * batch:
                features = product_input.shape[-1]
                yield RecordedDirection(
                    kind, steps, batch, features, width // _GATES[kind], inputs[0].dtype
                )


def _is_product(graph: Graph, task: int) -> bool:
    return graph.task(task).name in ("aten::mm", "aten::addmm", "aten::bmm")


def _sum_ns(graph: Graph, tasks: Sequence[int]) -> float:
    chosen = list(tasks)
    return float((graph.tasks.duration_ns[chosen] + graph.tasks.gap_ns[chosen]).sum())


def _replace(edit: Editor, graph: Graph, tasks: Sequence[int], cost: Price) -> int:
    """Replace `tasks` by one task that reads their inputs and writes their outputs."""
    inputs, outputs = flow_of(graph).boundary(tasks)
    call = Call("slipstream::scan_layers()", tuple(inputs.values()), tuple(outputs.values()))
    handle = edit.put(
        tasks[-1], call, cost, gap_ns=graph.task(tasks[-1]).gap_ns,
        storages=[*inputs, *outputs], sequence=graph.task(tasks[0]).sequence,
    )  # fmt: skip
    edit.remove(np.array(tasks))
    return handle


def _allocate(
    edit: Editor, graph: Graph, recurrence: Recurrence, forward: int, backward: int
) -> None:
    """Allocate the memory of a module whose passes are the tasks `forward` and `backward`."""
    edit.allocate(recurrence.temporary_bytes, Role.TEMPORARY, backward, backward)
    if recurrence.saved_bytes:
        edit.allocate(recurrence.saved_bytes, Role.ACTIVATION, forward, backward)
    # The backward pass also reads the module's output.
    saved_output = np.isin(graph.memory.producer, recurrence.forward)
    saved_output &= np.isin(
        graph.memory.storage, list(flow_of(graph).boundary(recurrence.forward)[1])
    )
    # A storage that the pass itself freed may have the same number: torch reuses them.
    release = graph.memory.release
    early = (release > max(recurrence.forward)) & (release < recurrence.backward[-1])
    edit.release_after(np.flatnonzero(saved_output & early), backward)
