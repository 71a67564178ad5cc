"""dropout: ``nn.Dropout`` in one pass over memory, its random numbers drawn again in the backward.

Source: Ivanov et al., "Data Movement Is All You Need: A Case Study on Optimizing Transformers",
MLSys 2021; random numbers: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from slipstream.durations import pace
from slipstream.errors import WorkloadError
from slipstream.graph import Call, Editor, Graph, StepPhase, TensorSpec, calls_of, price
from slipstream.graph.graph import kept
from slipstream.native import library, why_no_library
from slipstream.source import Places, Source
from slipstream.surgery import Selection, module_of
from slipstream.technique import CodeChange, Context, Quality, QualityKind, Settings, Stage, Traits
from slipstream.techniques._baseline import already_compiled
from slipstream.workload import BuiltWorkload, Workload

_SCOPE = ("aten::dropout", "aten::dropout_")
_MULTIPLY = ("aten::mul", "aten::mul_")
_OPERATOR = "slipstream::dropout(Tensor x, Tensor seed, float p) -> Tensor"
_SEED = TensorSpec("int64", (2,), (1,))
_COPY = "aten::copy_(Tensor(a!) self, Tensor src, bool non_blocking=False) -> Tensor(a!)"
_FUNCTION = (
    "its dropout is called as a function (F.dropout, or inside attention or nn.LSTM), not through "
    "an nn.Dropout; slipstream.nn.dropout takes the place of F.dropout"
)
_TORCH_CLASS, _OUR_CLASS = "torch.nn.Dropout", "slipstream.nn.Dropout"
# Classes of torch's that hold an nn.Dropout, which no edit of the user's file reaches.
_MAKERS = (
    "torch.nn.Transformer", "torch.nn.TransformerEncoderLayer", "torch.nn.TransformerDecoderLayer",
)  # fmt: skip
_BY_HAND = "import slipstream.nn\nself.drop = slipstream.nn.Dropout(0.1)"


@dataclass(frozen=True)
class FusedDropout(Settings):
    """Every ``nn.Dropout`` of the model as a ``slipstream.nn.Dropout``.

    Attributes:
        only, except_: patterns of modules' qualified names.
    """

    only: str = "*"
    except_: str = ""

    name: ClassVar[str] = "dropout"
    traits: ClassVar[Traits] = Traits(stage=Stage.MODEL)
    effect: ClassVar[Quality] = Quality(
        QualityKind.SAME_DISTRIBUTION,
        "elements are dropped with the same probability, by other random numbers",
    )

    def why_not(self, graph: Graph, workload: Workload | None = None) -> str | None:
        """None, or why no dropout of the step can be exchanged."""
        if (reason := already_compiled(graph)) is not None:
            return reason
        sites = _sites(graph)
        if not sites:
            return "no dropout runs in this step (none in the model, p = 0, or eval mode)"
        if not any(site.device == "cpu" for site in sites):
            return "on this device torch's dropout is one kernel already"
        if not any(site.whole_module for site in sites):
            return _FUNCTION
        if library() is None:
            return f"it needs the compiled library: {why_no_library()}"
        return self._selection.why_none(module_of(graph, one.draw) for one in _exchanged(graph))

    def required_timings(self, graph: Graph) -> Sequence[Call]:
        """Every dropout's operators beside the passes that come in their place."""
        asked: list[Call] = []
        for site in self._chosen(graph):
            asked += calls_of(graph, site.tasks)
            asked += [site.passing(backward) for backward in (False, True)]
            asked += [site.copy] if site.inplace else []
        return asked

    def predict(self, graph: Graph, context: Context) -> Graph:
        """One task in place of each dropout's forward operators, one in that of its backward."""
        sites = self._chosen(graph)
        edit = Editor(graph, str(self))
        in_step = pace(graph, [task for site in sites for task in site.tasks], context.durations)
        fresh = int(graph.operands.max(initial=-1)) + 1

        def put(at: Sequence[int], calls: Sequence[Call], call: Call, storages: list[int]) -> None:
            before_ns = float(graph.tasks.duration_ns[list(at)].sum())
            edit.put(
                at[-1], call, price(context.durations, calls, before_ns, pace=in_step),
                gap_ns=graph.task(at[-1]).gap_ns, storages=storages,
                sequence=graph.task(at[0]).sequence,
            )  # fmt: skip
            edit.remove(np.array(at))

        for number, site in enumerate(sites):
            seed = fresh + number
            copy = [site.copy] if site.inplace else []
            storages = [site.input, seed, site.output]
            put(site.forward, [site.passing(False), *copy], site.call, storages)
            if site.backward is not None:
                gradient, input_grad = site.gradients
                put([site.backward], [site.passing(True)], site.call, [gradient, seed, input_grad])
        removed = sum(len(site.tasks) for site in sites)
        return edit.apply(f"{removed} operators of {len(sites)} dropouts in one kernel each")

    def apply(self, built: BuiltWorkload) -> None:
        """Make every ``nn.Dropout`` of the model a ``slipstream.nn.Dropout``.

        Modules stay the objects they are, with their names and hooks. Subclasses are left alone.

        Raises:
            WorkloadError: the step hides its model, or the model has no ``nn.Dropout``.
        """
        from torch import nn

        from slipstream.techniques.dropout.nn import Dropout

        built.need_model(self.name)
        dropouts = {n: one for n, one in built.model.named_modules() if type(one) is nn.Dropout}
        if not dropouts:
            raise WorkloadError(
                "the model has no nn.Dropout",
                remedy="write slipstream.nn.dropout in place of F.dropout",
            )
        self._selection.need_some(self.name, dropouts)
        for name, module in dropouts.items():
            if name in self._selection:
                module.__class__ = Dropout

    def code(self, workload: Workload) -> CodeChange | None:
        """``slipstream.nn.Dropout`` where the file makes an ``nn.Dropout``."""
        if not self._selection.everything:
            return CodeChange("", f"for the modules you mean, by hand:\n{_BY_HAND}")
        return CodeChange.of(workload, _edit, by_hand=_BY_HAND)

    @property
    def _selection(self) -> Selection:
        return Selection(self.only, self.except_)

    def _chosen(self, graph: Graph) -> list[_Site]:
        """Sites of the modules that are meant."""
        sites = _exchanged(graph)
        return [one for one in sites if module_of(graph, one.draw) in self._selection]


def _edit(where: Places) -> Source:
    names = where.source.names
    for call in where.model_code:
        kind = names.qualified(call.func) if isinstance(call, ast.Call) else None
        if kind in _MAKERS:
            raise where.source.not_placed(
                f"{kind.removeprefix('torch.')} makes an nn.Dropout of its own", call
            )
    return where.replace_class(_TORCH_CLASS, _OUR_CLASS)


@dataclass(frozen=True)
class _Site:
    """One call of torch's dropout in the step.

    Attributes:
        forward: its tasks, in order.
        backward: the multiplication by the noise, if the step has it.
        p: of dropping.
        x: what it is given.
        input, output: storages of the forward pass.
        gradients: storages of what the backward pass is given and makes.
        whole_module: whether its module does nothing else in the forward pass.
    """

    forward: tuple[int, ...]
    backward: int | None
    p: float
    x: TensorSpec
    input: int
    output: int
    gradients: tuple[int, int]
    inplace: bool
    whole_module: bool

    @property
    def draw(self) -> int:
        """The first of its tasks."""
        return self.forward[0]

    @property
    def device(self) -> str:
        return self.x.device.partition(":")[0]

    @property
    def tasks(self) -> tuple[int, ...]:
        """Forward, then backward."""
        return self.forward if self.backward is None else (*self.forward, self.backward)

    @property
    def call(self) -> Call:
        """The operator that does it, in either direction."""
        return Call(_OPERATOR, (self.x, _SEED, self.p), (self.x,))

    @property
    def copy(self) -> Call:
        """What writes the result over the input."""
        return Call(_COPY, (self.x, self.x, False), (self.x,))

    def passing(self, backward: bool) -> Call:
        """The module's pass, as the micro-benchmark times it."""
        arguments = (_OUR_CLASS.replace(".Dropout", ":Dropout"), (("p", self.p),), self.x, backward)
        return Call("slipstream::module_pass()", arguments, (self.x,))


def _exchanged(graph: Graph) -> list[_Site]:
    return [site for site in _sites(graph) if site.whole_module and site.device == "cpu"]


@kept
def _sites(graph: Graph) -> list[_Site]:
    """Every dropout of the step: noise, its scaling, and the multiplication by it."""
    tasks = graph.tasks
    inside = [scope.rpartition("/")[2] in _SCOPE for scope in graph.texts("scope")]
    mixed = _mixed_modules(graph, inside)
    sites = []
    for draw in range(len(graph)):
        if not inside[draw] or _name(graph, draw) != "aten::bernoulli_":
            continue
        noise = int(graph.storages(draw)[0])
        first = last = draw
        while _belongs(graph, inside, first - 1, draw):
            first -= 1
        while _belongs(graph, inside, last + 1, draw) and _name(graph, last) not in _MULTIPLY:
            last += 1
        call = graph.task(last).call
        if _name(graph, last) not in _MULTIPLY or call is None or not call.inputs:
            continue
        # What was drawn is whether an element is kept; 1 - 0.9 should read 0.1.
        p = round(1.0 - float(graph.task(draw).known_call.arguments[1]), 12)
        back = _backward(graph, last, noise)
        operands = graph.storages(last).tolist()
        gradients = (-1, -1)
        if back is not None:
            there = graph.storages(back).tolist()
            gradients = (next(s for s in there if s != noise), there[-1])
        sites.append(
            _Site(
                forward=tuple(range(first, last + 1)),
                backward=back,
                p=p,
                x=call.inputs[0],
                input=operands[0],
                output=operands[-1],
                gradients=gradients,
                inplace=_name(graph, last) == "aten::mul_",
                whole_module=int(tasks.module[draw]) not in mixed,
            )
        )
    return sites


def _name(graph: Graph, task: int) -> str:
    return graph.task(task).name


def _belongs(graph: Graph, inside: Sequence[bool], task: int, draw: int) -> bool:
    """Whether `task` is part of the dropout that draws at `draw`."""
    tasks = graph.tasks
    return (
        0 <= task < len(graph)
        and inside[task]
        and tasks.scope[task] == tasks.scope[draw]
        and tasks.module[task] == tasks.module[draw]
        and tasks.call[task] >= 0
        and (task > draw or _name(graph, task) not in _MULTIPLY)
    )


def _backward(graph: Graph, forward: int, noise: int) -> int | None:
    """The multiplication of a gradient by `noise` that belongs to the task `forward`."""
    tasks: Any = graph.tasks
    theirs = (tasks.phase == StepPhase.BACKWARD) & (tasks.sequence == tasks.sequence[forward])
    for task in np.flatnonzero(theirs).tolist():
        if task > forward and _name(graph, task) == "aten::mul" and noise in graph.storages(task):
            return int(task)
    return None


def _mixed_modules(graph: Graph, inside: Sequence[bool]) -> set[int]:
    """Modules that hold others, or do something beside dropout: they call it as a function."""
    tasks: Any = graph.tasks
    forward = tasks.phase == StepPhase.FORWARD
    used = {int(module): graph.string(int(module)) for module in set(tasks.module.tolist())}
    holders = {path[:end] for path in used.values() for end, c in enumerate(path) if c == "."}
    return {
        *(module for module, path in used.items() if not path or path in holders),
        *(int(tasks.module[t]) for t in range(len(graph)) if forward[t] and not inside[t]),
    }
