"""Search a workload's model for subgraphs that cheaper compositions of functions replace."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from slipstream.tables import Field, Table
from slipstream.verbs.children import (
    DEFAULT_TIMEOUT_S,
    call_in_child,
    report_progress,
    run_program,
    send_to_keep,
)
from slipstream.workload import BuiltWorkload, Workload

_UNSEEN = "torch.compile's tracer saw no operators of the model"


@dataclass(frozen=True)
class FoundRule:
    """A rule that applies to the model.

    Attributes:
        pattern, replacement: as Python expressions of the inputs ``a``, ``b``, ....
        stored: whether an earlier search found it.
        places: number of subgraphs that it replaces.
        forward, training: time of the pattern over that of the replacement, for the forward pass
            and with the backward pass; 0 if the pass cannot run alone.
    """

    pattern: str
    replacement: str
    stored: bool
    places: int
    forward: float
    training: float


@dataclass(frozen=True)
class Rewrites:
    """The rules that apply to a model.

    Attributes:
        operators: number of operators that were searched.
        reasons: why parts of the model were not searched.
    """

    workload: str
    rules: tuple[FoundRule, ...]
    operators: int
    reasons: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the rules and reasons."""
        return {
            "workload": self.workload,
            "rules": [dict(vars(rule)) for rule in self.rules],
            "operators": self.operators,
            "reasons": list(self.reasons),
        }

    def table(self) -> Table:
        """Return a table of the rules, with what to do next as a note."""
        fields: tuple[Field[FoundRule], ...] = (
            Field.of("replacement", lambda rule: rule.replacement),
            Field.of("of", lambda rule: _shortened(rule.pattern)),
            Field.of("rule", lambda rule: "stored" if rule.stored else "found"),
            Field.number("places", lambda rule: rule.places),
            Field.number("forward", lambda rule: _ratio(rule.forward)),
            Field.number("with backward", lambda rule: _ratio(rule.training)),
        )
        after = f"next: slipstream prove {self.workload} --technique rewrite"
        none = f"operators searched: {self.operators}; no faster replacement was found"
        notes = [*self.reasons, after if self.rules else none if self.operators else _UNSEEN]
        return Table.of(self.rules, fields, f"rewrites of {self.workload}", notes)


def find_rewrites(
    workload: Workload | str,
    *,
    max_ops: int = 2,
    budget_s: float = 120.0,
    threads: int = 0,
    report: Callable[[str], None] = lambda line: None,
) -> Rewrites:
    """Search the model of `workload` for rules, and store them for the technique ``rewrite``.

    Args:
        max_ops: functions in a replacement.
        budget_s: CPU seconds of the search.

    Raises:
        WorkloadError: the workload fails, hides its model, or is compiled already.
    """
    from slipstream.techniques.rewrite.rules import RuleStore

    store = RuleStore()
    recipe = workload if isinstance(workload, Workload) else Workload.parse(workload)
    answer = call_in_child(
        recipe, "slipstream.verbs.rewriting:search_in_child", threads=threads,
        timeout_s=DEFAULT_TIMEOUT_S, report=report, keep=lambda result: store.save(*result),
        max_ops=max_ops, budget_s=budget_s,
    )  # fmt: skip
    rules = tuple(FoundRule(*row) for row in answer["rules"])
    return Rewrites(recipe.name, rules, answer["operators"], tuple(answer["reasons"]))


def search_in_child(workload: dict[str, Any], keep_in: str, max_ops: int, budget_s: float) -> Any:
    return run_program(workload, keep_in, partial(_search, max_ops=max_ops, budget_s=budget_s))


def _search(
    built: BuiltWorkload, max_ops: int, budget_s: float
) -> Generator[None, Any, dict[str, Any]]:
    from torch import Tag
    from torch._dynamo.utils import graph_break_reasons

    from slipstream.capture.compiling import graph_breaks, put_compiled
    from slipstream.surgery.fx import trace_of
    from slipstream.techniques.rewrite.regions import traced_steps
    from slipstream.techniques.rewrite.rules import RuleStore, find_rules, known_places
    from slipstream.techniques.rewrite.timing import gains
    from slipstream.techniques.rewrite.tracing import TracingBackend

    built.need_model("synth rewrites")
    store, left_s = RuleStore(report=lambda *result: send_to_keep(result)), budget_s
    rows: dict[str, list[Any]] = {}
    operators, first_break = 0, len(graph_break_reasons)

    def search(module: Any) -> None:
        traced = trace_of(module)
        excluded = {
            str(operator)
            for operator in (cast(Any, node.target) for node in traced.nodes)
            if Tag.nondeterministic_seeded in operator.tags or operator._schema.is_mutable
        }
        if excluded:
            names = ", ".join(sorted(excluded))
            backend.reasons.append(f"not searched, since random or in place: {names}")
        earlier = {rule.signature for rule in store.rules()}
        nonlocal left_s, operators
        operators += len(traced.operations)
        begin = time.process_time()
        find_rules(traced, store, max_ops=max_ops, budget_s=left_s, report=report_progress)
        left_s -= time.process_time() - begin
        if left_s <= 0:
            backend.reasons.append("not searched completely, since the --budget was spent")
        for place in known_places(traced, traced_steps(traced), store, built.training):
            rule = place.rule
            if rule.signature not in rows:
                sources = rule.pattern.source, rule.replacement.source
                own = rule.specs == place.specs
                timed = rule.gains if own else gains(rule.pattern, rule.replacement, place.specs)
                rows[rule.signature] = [*sources, rule.signature in earlier, 0, *timed]
            rows[rule.signature][3] += 1

    backend = TracingBackend(search)
    put_compiled(built.model, backend=backend, dynamic=False)
    yield
    breaks = (
        f"torch.compile's tracer skipped code at {found['where'] or 'an unknown place'}: "
        f"{found['reason']}"
        for found in graph_breaks(graph_break_reasons[first_break:])
    )
    reasons = list(dict.fromkeys([*backend.reasons, *breaks]))
    return {"rules": list(rows.values()), "operators": operators, "reasons": reasons}


def _ratio(value: float) -> str:
    return f"{value:.2f}x" if value else "-"


def _shortened(text: str, width: int = 60) -> str:
    return text if len(text) <= width else text[: width - 3] + "..."
