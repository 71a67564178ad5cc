"""rewrite: subgraphs replaced by cheaper compositions of torch's functions.

``slipstream synth rewrites`` searches for the rules, and stores them for every model.

Source: Massalin, "Superoptimizer: A Look at the Smallest Program", ASPLOS 1987; Jia et al., "TASO:
Optimizing Deep Learning Computation with Automatic Generation of Graph Substitutions", SOSP 2019.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from slipstream.errors import WorkloadError
from slipstream.graph import Call, Editor, Graph, Price, StepPhase
from slipstream.graph.flow import Match, flow_of
from slipstream.graph.graph import cached_per_graph
from slipstream.provenance import Provenance
from slipstream.surgery import difference, outputs_of
from slipstream.technique import (
    CodeChange,
    Context,
    Quality,
    QualityKind,
    Stage,
    TechniqueSettings,
    Traits,
)
from slipstream.techniques._baseline import already_autocast, already_compiled, hidden_model
from slipstream.workload import BuiltWorkload, Workload
from slipstream.workload.built import model_output

if TYPE_CHECKING:
    from slipstream.techniques.rewrite.rules import Rule

_SEARCH = "search for rules with: slipstream synth rewrites WORKLOAD"
# Guards and calls of a graph of torch.compile, per call of the model.
_OVERHEAD_NS = 60e3
# Rules were timed in isolation, perhaps at other sizes.
_SPREAD = 0.2


@dataclass(frozen=True)
class Rewrite(TechniqueSettings):
    """Replacement of subgraphs by cheaper equal ones, with the rules that were found so far."""

    name: ClassVar[str] = "rewrite"
    traits: ClassVar[Traits] = Traits(
        stage=Stage.MODEL, conflicts=frozenset({"compile", "fusion", "cuda_graphs", "amp"})
    )
    effect: ClassVar[Quality] = Quality(
        QualityKind.ROUNDING,
        "values and gradients were compared on 256 inputs of several shapes; where the original "
        "overflows, the replacement need not",
    )

    def why_not(self, graph: Graph, workload: Workload | None = None) -> str | None:
        """Return why no rule applies; None if one does."""
        for reason in (already_compiled(graph), already_autocast(graph), hidden_model(graph)):
            if reason is not None:
                return reason
        if not (rules := _rules()):
            return f"no rules are known for this machine and version of torch; {_SEARCH}"
        if not _matches(graph, rules):
            return f"none of the {len(rules)} known rules applies and is faster; {_SEARCH}"
        return None

    def predict(self, graph: Graph, context: Context) -> Graph:
        """Replace the operators of each match by a task, and their gradients by another.

        The recorded durations are divided by the speed-up that was measured for the rule.
        """
        edit, found, flow = Editor(graph, str(self)), _matches(graph, _rules()), flow_of(graph)
        for match in found:
            forward, both = match.settings.gains
            before_ns, back_ns = (
                float(graph.tasks.duration_ns[[*tasks]].sum())
                for tasks in (match.forward, match.backward)
            )
            after_ns = [before_ns / (forward or both)]
            if match.backward:
                after_ns.append(max((before_ns + back_ns) / both - after_ns[0], 0.0))
            for tasks, nanoseconds in zip((match.forward, match.backward), after_ns, strict=False):
                inputs, outputs = flow.boundary(tasks)
                call = Call("slipstream::rewrite()", (*inputs.values(),), (*outputs.values(),))
                edit.put(
                    tasks[-1], call, Price(nanoseconds, _SPREAD, Provenance.MICROBENCHMARK),
                    storages=[*inputs, *outputs], sequence=graph.task(tasks[0]).sequence,
                )  # fmt: skip
        if not found:
            return edit.apply("no known rule applies and is faster")
        edit.remove(np.array(sorted(task for match in found for task in match.tasks)))
        first = max(min(match.forward[0] for match in found) - 1, 0)
        edit.insert(first, "guards and calls", _OVERHEAD_NS, Provenance.ASSUMED, spread=1.0)
        sources = dict.fromkeys(match.settings.replacement.source for match in found)
        operators = sum(len(match.forward) for match in found)
        return edit.apply(
            f"{len(found)} subgraphs of {operators} operators become {'; '.join(sources)}",
            "the numbers in a recorded step's operators are unknown; apply compares them",
        )

    def apply(self, built: BuiltWorkload) -> None:
        """Route the model through torch.compile's tracer, with subgraphs replaced.

        Operators run in eager mode as before. The outputs are compared with the original's.

        Raises:
            WorkloadError: the step hides its model, no rule applies, or the rewritten model
                computes something else; then the model is restored.
        """
        from slipstream.techniques.rewrite.rules import RuleStore, use_rules

        built.need_model(self.name)
        if built.training and built.batch is None:
            raise WorkloadError(
                "rewrite needs a batch to check the rewritten model, but this step hides it",
                remedy="return (model, batch, loss, optimizer)",
            )
        run = partial(model_output, built) if built.training else built.step
        before = outputs_of(built.model, run)
        store = RuleStore(report=lambda key, value: None)
        replaced, reasons = use_rules(built.model, store, built.training)
        try:
            wrong = difference(before, outputs_of(built.model, run))
        except Exception as error:
            wrong = f"it fails with {type(error).__name__}: {error}"
        if wrong is None and replaced:
            return
        built.model._compiled_call_impl = None
        if wrong is not None:
            raise WorkloadError(
                f"the rewritten model computes something else: {wrong}",
                where="; ".join(dict.fromkeys(replaced)) or None,
                remedy="report it with the model; without rewrite the model works as before",
            )
        raise WorkloadError(
            "no known rule applies to the model and is faster",
            where="; ".join(dict.fromkeys(reasons)) or None,
            remedy=_SEARCH,
        )

    def code(self, workload: Workload) -> CodeChange | None:
        """Return no edit, but the known rules."""
        note = f"by hand: slipstream synth rewrites {workload.name} lists what to write"
        return CodeChange("", note=note)


@cached_per_graph
def _matches(graph: Graph, rules: tuple[Rule, ...]) -> tuple[Match, ...]:
    """Return disjoint places of a recorded step with the wiring of a rule, as its settings."""
    from slipstream.techniques.rewrite.regions import matches_of, recorded_steps

    flow = flow_of(graph)
    steps, tasks = recorded_steps(graph)
    training = bool((graph.tasks.phase == StepPhase.BACKWARD).any())
    by_rows = {rule.rows: rule for rule in rules if rule.is_faster(training)}
    taken: set[int] = set()
    found = []
    for rows, root, members in sorted(matches_of(steps, by_rows), key=lambda m: -len(m[2])):
        last = flow.call(tasks[root])
        assert last is not None
        if taken & members or last.outputs[0].device != "cpu":
            continue
        taken |= members
        computing = [tasks[n] for n in members]
        inner = [task for task in computing if task != tasks[root]]
        forward = sorted({*computing, *(view for task in inner for view in flow.views_of[task])})
        backward = sorted({back for task in forward for back in flow.backward[task]})
        first = flow.call(forward[0])
        assert first is not None
        module = graph.task(tasks[root]).module.partition(".")[2]
        found.append(
            Match(
                "rewrite", module, tuple(forward), tuple(backward), first.inputs[0],
                last.outputs[0], {}, by_rows[rows],
            )
        )  # fmt: skip
    return tuple(found)


def _rules() -> tuple[Rule, ...]:
    from slipstream.techniques.rewrite.rules import RuleStore

    return tuple(RuleStore().rules())
