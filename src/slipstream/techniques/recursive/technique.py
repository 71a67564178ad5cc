"""recursive: all nodes of a tree or DAG in one compiled kernel call.

Source: Fegade et al., "Cortex: A Compiler for Recursive Deep Learning Models", MLSys 2021.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from slipstream.codegen import why_no_compiler
from slipstream.errors import WorkloadError
from slipstream.graph import Call, Editor, Graph, StepPhase, price
from slipstream.graph.flow import Flow, Match, flow_of, matches
from slipstream.native import library, why_no_library
from slipstream.technique import (
    CodeChange,
    Context,
    ModuleTechnique,
    Quality,
    QualityKind,
    Stage,
    Traits,
)
from slipstream.techniques._baseline import already_autocast, already_compiled
from slipstream.techniques.recursive.timing import Product, structure_call
from slipstream.workload import BuiltWorkload, Workload

_PRODUCTS = {"aten::mm": 1, "aten::addmm": 2, "aten::mv": 0, "aten::addmv": 1}
"""Operators, with the number of the input that is their weight."""
_MAX_NODES = 100_000
"""Structures with more nodes are not timed."""
_NONE = "no module calls itself in this step"


@dataclass(frozen=True)
class Recursive(ModuleTechnique):
    """Technique that computes all nodes below the one that a recursive module is called with.

    Attributes:
        only, except_: patterns of modules' qualified names.
    """

    only: str = "*"
    except_: str = ""

    name: ClassVar[str] = "recursive"
    traits: ClassVar[Traits] = Traits(
        stage=Stage.MODEL, conflicts=frozenset({"compile", "fusion", "amp"})
    )
    effect: ClassVar[Quality] = Quality(
        QualityKind.ROUNDING, "the same sums in another order; Fegade et al. 2021"
    )

    def why_not(self, graph: Graph, workload: Workload | None = None) -> str | None:
        """Return why no module of the step can be compiled, or None."""
        for reason in (already_compiled(graph), already_autocast(graph)):
            if reason is not None:
                return reason
        if (reason := self.no_match_reason(matches(graph, recursions), _NONE)) is not None:
            return reason
        if (reason := why_no_compiler()) is not None:
            return f"kernels are generated in C++, and {reason}"
        return None if library() is not None else f"no compiled library: {why_no_library()}"

    def required_timings(self, graph: Graph) -> Sequence[Call]:
        """Return the passes of each module."""
        return [
            call
            for recursion in self.chosen(matches(graph, recursions))
            for call in recursion.calls()
        ]

    def predict(self, graph: Graph, context: Context) -> Graph:
        """Replace the operators of each module's passes by one task per pass."""
        edit, removed = Editor(graph, str(self)), 0
        chosen = self.chosen(matches(graph, recursions))
        for recursion in chosen:
            passes = (recursion.forward, recursion.backward)
            for tasks, call in zip(passes, recursion.calls(), strict=False):
                measured_ns = graph.tasks.duration_ns[[*tasks]] + graph.tasks.gap_ns[[*tasks]]
                cost = price(context.durations, call, float(measured_ns.sum()))
                inputs, outputs = flow_of(graph).boundary(tasks)
                replaced = Call(
                    "slipstream::recursive_nodes()", tuple(inputs.values()), tuple(outputs.values())
                )
                edit.put(
                    tasks[-1], replaced, cost, gap_ns=graph.task(tasks[-1]).gap_ns,
                    storages=[*inputs, *outputs], sequence=graph.task(tasks[0]).sequence,
                )  # fmt: skip
                edit.remove(np.array(tasks))
                removed += len(tasks)
        return edit.apply(f"{removed} operators of {len(chosen)} recursive modules in kernels")

    def apply(self, built: BuiltWorkload) -> None:
        """Compile the calls of modules that call themselves; the first call compiles.

        Raises:
            WorkloadError: the step hides its model, or no module calls itself.
        """
        from slipstream.techniques.recursive.calls import compile_calls, recursive_modules

        built.need_model(self.name)
        names = recursive_modules(built.model)
        if not names:
            raise WorkloadError(
                "no module of the model has a method that calls self(...)",
                remedy="compile it in your code: slipstream.recursive.compile(model, example)",
            )
        self.require_match(names)
        compile_calls(built.model, [name for name in names if name in self.selection])

    def code(self, workload: Workload) -> CodeChange | None:
        """Return the call after the model is created."""
        lines = ("import slipstream", "slipstream.recursive.compile_calls({model})")
        by_hand = "\n".join(lines).format(model="model")
        if not self.selection.everything:
            return CodeChange("", f"by hand, with the names of the selected modules:\n{by_hand}")
        return CodeChange.of(workload, lambda where: where.after_model(*lines), by_hand=by_hand)


@dataclass(frozen=True, eq=False)
class Recursion(Match):
    """Tasks of a module that calls itself.

    Attributes:
        arities: recursive calls within each call, in order.
        products: matmuls of an inner node.
    """

    arities: tuple[int, ...] = ()
    products: tuple[Product, ...] = ()

    def calls(self) -> list[Call]:
        """Return the calls to time: the forward pass, and the backward pass if there is one."""
        training = bool(self.backward)
        return [
            structure_call(self.arities, self.products, self.y.dtype, backward, training)
            for backward in (False, True)[: 1 + training]
        ]


def recursions(flow: Flow) -> Iterator[Recursion]:
    """Find the tasks of every module that calls itself, see `ModuleNames.calls`."""
    graph, column = flow.graph, flow.graph.tasks
    recorded: dict[str, list[int]] = graph.meta.get("recursive") or {}
    for name, arities in recorded.items():
        own = [text == name or text.startswith(f"{name}.") for text in graph.strings]
        inside = np.array(own, bool)[column.module] & (column.phase == StepPhase.FORWARD)
        tasks = np.flatnonzero(inside & (column.call >= 0)).tolist()
        if not tasks:
            continue
        backward = sorted({b for t in tasks for b in flow.backward[t] if column.call[b] >= 0})
        calls = [graph.calls[column.call[task]] for task in tasks]
        products = tuple(_products(graph, tasks, len(arities) - arities.count(0)))
        first, last = (
            next(spec for call in order for spec in (*call.outputs, *call.inputs))
            for order in (calls, calls[::-1])
        )
        yield Recursion(
            "recursion", name.partition(".")[2], tuple(tasks), tuple(backward), first, last, {},
            None, _refusal(name, arities, products, last.dtype), tuple(arities), products,
        )  # fmt: skip


def _products(graph: Graph, tasks: Sequence[int], inner: int) -> Iterator[Product]:
    """Yield matmuls of inner nodes; those of leaves and of words are looked up."""
    found: Counter[tuple[int, int, int]] = Counter()
    for task in tasks:
        call = graph.calls[graph.tasks.call[task]]
        if call.name in _PRODUCTS and len(call.inputs) > _PRODUCTS[call.name]:
            depth, columns = call.inputs[_PRODUCTS[call.name]].shape[-2:]
            if call.name in ("aten::mv", "aten::addmv"):
                depth, columns = columns, depth
            found[depth, columns, int(graph.tasks.module[task])] += 1
    for (depth, columns, _), count in found.items():
        if count >= inner and count % inner == 0:
            yield depth, columns, count // inner


def _refusal(
    name: str, arities: Sequence[int], products: Sequence[Product], dtype: str
) -> str | None:
    if not products:
        return f"{name} has no matmul at its inner nodes"
    if dtype not in ("float32", "float64"):
        return f"{name} computes in {dtype}; kernels compute in float32 and float64"
    if len(arities) > _MAX_NODES:
        return f"{name} is called {len(arities)} times in a step; at most {_MAX_NODES} are timed"
    return None
