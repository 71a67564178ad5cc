"""dropout: ``nn.Dropout`` in one pass over memory, with random numbers regenerated in backward.

Source: Ivanov et al., "Data Movement Is All You Need: A Case Study on Optimizing Transformers",
MLSys 2021; random numbers: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from slipstream.durations import pace
from slipstream.errors import WorkloadError
from slipstream.graph import (
    Call,
    Editor,
    Graph,
    Price,
    StepPhase,
    TensorSpec,
    calls_of,
    price,
    price_columns,
)
from slipstream.graph.flow import Flow, Match, flow_of, matches
from slipstream.native import library, why_no_library
from slipstream.source import Places, Source
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
from slipstream.workload import BuiltWorkload, Workload

_SCOPE = ("aten::dropout", "aten::dropout_")
_MULTIPLY = ("aten::mul", "aten::mul_")
_OPERATOR = "slipstream::dropout(Tensor x, Tensor seed, float p) -> Tensor"
_SEED = TensorSpec("int64", (2,), (1,))
_COPY = "aten::copy_(Tensor(a!) self, Tensor src, bool non_blocking=False) -> Tensor(a!)"
_FUNCTION = (
    "its dropout is called as a function (F.dropout, or inside attention or nn.LSTM), not through "
    "an nn.Dropout; slipstream.nn.dropout replaces F.dropout"
)
_TORCH_CLASS, _OUR_CLASS = "torch.nn.Dropout", "slipstream.nn.Dropout"
# Classes of torch that contain an nn.Dropout, which an edit of the user's file cannot reach.
_CONTAINERS = (
    "torch.nn.Transformer", "torch.nn.TransformerEncoderLayer", "torch.nn.TransformerDecoderLayer",
)  # fmt: skip
_BY_HAND = "import slipstream.nn\nself.drop = slipstream.nn.Dropout(0.1)"


@dataclass(frozen=True)
class FusedDropout(ModuleTechnique):
    """Replacement of every ``nn.Dropout`` by ``slipstream.nn.Dropout``.

    Attributes:
        only, except_: patterns of modules' qualified names.
    """

    only: str = "*"
    except_: str = ""

    name: ClassVar[str] = "dropout"
    traits: ClassVar[Traits] = Traits(stage=Stage.MODEL)
    effect: ClassVar[Quality] = Quality(
        QualityKind.SAME_DISTRIBUTION,
        "elements are dropped with the same probability, but by different random numbers",
    )

    def why_not(self, graph: Graph, workload: Workload | None = None) -> str | None:
        """Return why no dropout of the step can be replaced; None if one can."""
        if (reason := already_compiled(graph)) is not None:
            return reason
        missing = "no dropout runs in this step (none in the model, p = 0, or eval mode)"
        if (reason := self.no_match_reason(matches(graph, _dropouts), missing)) is not None:
            return reason
        if library() is None:
            return f"it needs the compiled library: {why_no_library()}"
        return None

    def required_timings(self, graph: Graph) -> Sequence[Call]:
        """Return the operators of every dropout and the passes that replace them."""
        timings: dict[Hashable, list[Call]] = {}
        for site in self.chosen(matches(graph, _dropouts)):
            recorded = tuple(graph.tasks.call[list(site.tasks)].tolist())
            key = site.x, site.settings, site.inplace, recorded
            if key not in timings:
                passes = [site.passing(backward) for backward in (False, True)]
                copies = [site.copy] if site.inplace else []
                timings[key] = [*calls_of(graph, site.tasks), *passes, *copies]
        return [call for calls in timings.values() for call in calls]

    def predict(self, graph: Graph, context: Context) -> Graph:
        """Replace the forward operators of each dropout by one task, and the backward ones too."""
        sites = self.chosen(matches(graph, _dropouts))
        edit = Editor(graph, str(self))
        in_step = pace(graph, [task for site in sites for task in site.tasks], context.durations)
        unused = flow_of(graph).unused_storage
        cached: dict[Hashable, Price] = {}
        begins, ends, numbers = [], [], []
        prices: list[Price] = []
        storages: list[list[int]] = []
        for seed, site in enumerate(sites, unused):
            passes = [(False, site.forward, site.storages), (True, site.backward, site.gradients)]
            for backward, tasks, (read, written) in passes[: 1 + bool(site.backward)]:
                copied = site.inplace and not backward
                key = site.x, site.settings, copied, backward
                if key not in cached:
                    calls = [site.passing(backward), *([site.copy] if copied else [])]
                    cached[key] = price(context.durations, calls, math.nan, pace=in_step)
                cost = cached[key]
                if math.isnan(cost.nanoseconds):
                    before_ns = float(graph.tasks.duration_ns[list(tasks)].sum())
                    cost = replace(cost, nanoseconds=before_ns)
                begins.append(tasks[0])
                ends.append(tasks[-1])
                numbers.append(edit.call_number(site.call))
                prices.append(cost)
                storages.append([read, seed, written])
        durations_ns, provenance, spread = price_columns(prices)
        edit.insert_all(
            np.array(ends), "slipstream::dropout", durations_ns, provenance, spread=spread,
            gap_ns=graph.tasks.gap_ns[ends], call=numbers, storages=storages,
            sequence=graph.tasks.sequence[begins],
        )  # fmt: skip
        edit.remove(np.array([task for site in sites for task in site.tasks]))
        removed = sum(len(site.tasks) for site in sites)
        return edit.apply(f"{removed} operators of {len(sites)} dropouts in one kernel each")

    def apply(self, built: BuiltWorkload) -> None:
        """Turn every ``nn.Dropout`` of the model into a ``slipstream.nn.Dropout``.

        Modules keep their identity, names and hooks. Subclasses are unchanged.

        Raises:
            WorkloadError: the step hides its model, or the model has no ``nn.Dropout``.
        """
        from torch import nn

        from slipstream.techniques.dropout.nn import Dropout

        built.need_model(self.name)
        dropouts = {n: m for n, m in built.model.named_modules() if type(m) is nn.Dropout}
        if not dropouts:
            raise WorkloadError(
                "the model has no nn.Dropout",
                remedy="write slipstream.nn.dropout instead of F.dropout",
            )
        self.require_match(dropouts)
        for name, module in dropouts.items():
            if name in self.selection:
                module.__class__ = Dropout

    def code(self, workload: Workload) -> CodeChange | None:
        """Return the replacement of each ``nn.Dropout(...)`` in the file."""
        if not self.selection.everything:
            return CodeChange("", f"edit the selected modules by hand:\n{_BY_HAND}")
        return CodeChange.of(workload, _edit, by_hand=_BY_HAND)


def _edit(where: Places) -> Source:
    names = where.source.names
    for call in where.model_code:
        kind = names.qualified(call.func) if isinstance(call, ast.Call) else None
        if kind in _CONTAINERS:
            raise where.source.location_error(
                f"{kind.removeprefix('torch.')} creates its own nn.Dropout", call
            )
    return where.replace_class(_TORCH_CLASS, _OUR_CLASS)


@dataclass(frozen=True, eq=False)
class _Dropout(Match):
    """A call of torch's dropout in the step; its settings are the probability of dropping.

    Attributes:
        storages: of the input and the output.
        gradients: storages of the gradients of the output and the input.
        inplace: whether the output overwrites the input.
    """

    storages: tuple[int, int] = (-1, -1)
    gradients: tuple[int, int] = (-1, -1)
    inplace: bool = False

    @property
    def call(self) -> Call:
        """The fused operator, which serves both directions."""
        return Call(_OPERATOR, (self.x, _SEED, self.settings), (self.x,))

    @property
    def copy(self) -> Call:
        """The copy of the result into the input."""
        return Call(_COPY, (self.x, self.x, False), (self.x,))

    def passing(self, backward: bool) -> Call:
        """Return the module's pass that the micro-benchmark times."""
        settings = (("p", self.settings),)
        arguments = (_OUR_CLASS.replace(".Dropout", ":Dropout"), settings, self.x, backward)
        return Call("slipstream::module_pass()", arguments, (self.x,))


def _dropouts(flow: Flow) -> Iterator[_Dropout]:
    """Find every dropout of the step: noise, its scaling, and the multiplication."""
    graph, tasks = flow.graph, flow.graph.tasks
    innermost = [text.rpartition("/")[2] in _SCOPE for text in graph.strings]
    inside = np.array(innermost, bool)[tasks.scope]
    draws, multiplies = (
        np.flatnonzero(np.array([text in names for text in graph.strings], bool)[tasks.name])
        for names in (("aten::bernoulli_",), _MULTIPLY)
    )
    draws = draws[inside[draws]]
    # Operators of a dropout are consecutive.
    codes = np.stack([tasks.scope, tasks.module, inside & (tasks.call >= 0)])
    begins = np.flatnonzero((np.diff(codes, axis=1, prepend=-1) != 0).any(axis=0))
    ends = np.append(begins, len(graph))[np.searchsorted(begins, draws, side="right")]
    begins = begins[np.searchsorted(begins, draws, side="right") - 1]
    next_multiply = np.searchsorted(multiplies, draws)
    firsts = np.maximum(begins, np.concatenate([[-1], multiplies])[next_multiply] + 1)
    lasts = np.append(multiplies, len(graph))[next_multiply]
    shared = _shared_modules(graph, inside)
    numbers = (column.tolist() for column in (draws, firsts, lasts, lasts < ends))
    for draw, first, last, complete in zip(*numbers, strict=True):
        call = graph.task(last).call if complete else None
        if call is None or not call.inputs:
            continue
        view, noise, x = graph.task(last), graph.task(draw).storages[0], call.inputs[0]
        backward: tuple[int, ...] = ()
        gradients = -1, -1
        for back in flow.backward[last]:
            storages = graph.task(back).storages
            if graph.task(back).name == "aten::mul" and noise in storages:
                backward = (back,)
                gradients = next(s for s in storages if s != noise), storages[-1]
                break
        refusal = None if view.module not in shared else _FUNCTION
        if not x.device.startswith("cpu"):
            refusal = "torch's dropout is already one kernel on this device"
        yield _Dropout(
            "dropout", view.module.partition(".")[2], tuple(range(first, last + 1)), backward,
            x, call.outputs[0] if call.outputs else x, {},
            # Torch draws the probability of keeping an element; 1 - 0.9 should read 0.1.
            round(1.0 - float(graph.task(draw).known_call.arguments[1]), 12), refusal,
            (view.storages[0], view.storages[-1]), gradients, view.name == "aten::mul_",
        )  # fmt: skip


def _shared_modules(graph: Graph, inside: NDArray[np.bool_]) -> set[str]:
    """Return modules with children or other operators: they call dropout as a function."""
    tasks = graph.tasks
    used = {graph.strings[module] for module in np.unique(tasks.module).tolist()}
    parents = {path[:end] for path in used for end, c in enumerate(path) if c == "."}
    busy = np.unique(tasks.module[(tasks.phase == StepPhase.FORWARD) & ~inside]).tolist()
    return {"", *parents, *(graph.strings[module] for module in busy)}
