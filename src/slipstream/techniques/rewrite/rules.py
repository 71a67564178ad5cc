"""Rules: patterns with their replacements, searched for in a model and stored for the next one.

The store also has the replacements that a check refuted, so that none is offered again with the
same version of torch.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule
from torch.utils._python_dispatch import TorchDispatchMode

from slipstream.capture import put_compiled
from slipstream.durations.durations import cache_folder
from slipstream.durations.microbenchmark import random_tensor
from slipstream.errors import SlipstreamError
from slipstream.graph import TensorSpec
from slipstream.graph.call import decode, encode
from slipstream.sqlite import open_database
from slipstream.surgery import fx
from slipstream.techniques.rewrite import regions
from slipstream.techniques.rewrite.expression import Expression, is_view
from slipstream.techniques.rewrite.regions import Pattern, Row, Step
from slipstream.techniques.rewrite.search import Enumeration
from slipstream.techniques.rewrite.tracing import TracingBackend
from slipstream.techniques.rewrite.verify import why_different

# Values of `at_base` and `viewed` that patterns are read with.
_VARIANTS = ((False, False), (False, True), (True, False))
_MIGRATIONS = (
    """CREATE TABLE verdict (
        torch TEXT NOT NULL, signature TEXT NOT NULL, replacement TEXT NOT NULL,
        refuted TEXT, rule TEXT NOT NULL,
        PRIMARY KEY (torch, signature, replacement)) WITHOUT ROWID;""",
)
# CPU seconds per pattern for a search of 1, 2, ... functions.
_BUDGETS_S = (0.5, 2.0, 6.0, 10.0)
_MAX_REFUTED = 3
_MAX_CHECKS = 8


@dataclass(frozen=True)
class Rule:
    """A pattern and a replacement that was checked.

    Attributes:
        rows: wiring of the pattern's operators, to find it in other models.
        specs: inputs of the pattern where it was found.
        variant: how its expression was read: `at_base` and `viewed` of `pattern_of`.
    """

    pattern: Expression
    replacement: Expression
    rows: tuple[Row, ...]
    specs: tuple[TensorSpec, ...]
    variant: tuple[bool, bool] = (False, False)

    @property
    def signature(self) -> str:
        """The identity of the pattern on inputs whose extents are numbered by first use."""
        numbers: dict[int, int] = {1: 0}

        def numbered(extents: Sequence[int]) -> list[int]:
            return [numbers.setdefault(extent, len(numbers)) for extent in extents]

        shapes = [[spec.dtype, numbered(spec.shape)] for spec in self.specs]
        calls = [
            [i.op, *(numbered(a) if n == 1 and is_view(i.op) and isinstance(a, tuple) else repr(a)
                     for n, a in enumerate(i.arguments))]
            for i in self.pattern.instructions
        ]  # fmt: skip
        return json.dumps([shapes, calls, self.pattern.constants, self.pattern.result.index])

    def to_json(self) -> list[Any]:
        expressions = self.pattern.to_json(), self.replacement.to_json()
        return [*expressions, self.rows, encode(list(self.specs)), self.variant]

    @classmethod
    def from_json(cls, value: list[Any]) -> Rule:
        pattern, replacement, rows, specs, (at_base, viewed) = value
        return cls(
            Expression.from_json(pattern), Expression.from_json(replacement),
            tuple((name, tuple(dims), tuple(operands)) for name, dims, operands in rows),
            tuple(decode(specs)), (at_base, viewed),
        )  # fmt: skip


class RuleStore:
    """Verdicts about replacements with this version of torch.

    Args:
        path: the database; ``rewrites.db`` in the folder of cached measurements by default.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path or cache_folder() / "rewrites.db"

    def _rows(self, query: str, *values: str | None) -> list[Any]:
        with contextlib.closing(open_database(self._path, _MIGRATIONS)) as connection:
            rows: list[Any] = connection.execute(query, (version("torch"), *values)).fetchall()
            return rows

    def rules(self) -> list[Rule]:
        """Return the accepted rules.

        Raises:
            SlipstreamError: one is not a rule on operators of this torch.
        """
        rows = self._rows("SELECT rule FROM verdict WHERE torch = ? AND refuted IS NULL")
        try:
            return [Rule.from_json(json.loads(rule)) for (rule,) in rows]
        except (AttributeError, TypeError, ValueError, KeyError) as error:
            raise SlipstreamError(
                f"a stored rule cannot be read: {error}", where=str(self._path),
                remedy="delete the file, and search again",
            ) from error  # fmt: skip

    def refuted(self, signature: str) -> dict[str, str]:
        """Return the refuted replacements of a pattern, with the reason of each."""
        columns = "SELECT replacement, refuted FROM verdict WHERE torch = ? AND signature = ? "
        return dict(self._rows(columns + "AND refuted IS NOT NULL", signature))

    def add(self, rule: Rule, refuted: str | None = None) -> None:
        """Store a rule, or why its replacement was refuted."""
        self._rows(
            "INSERT OR REPLACE INTO verdict VALUES (?, ?, ?, ?, ?)",
            rule.signature, rule.replacement.key, refuted, json.dumps(rule.to_json()),
        )  # fmt: skip


def why_unsuitable(rule: Rule) -> str | None:
    """Return why a rule is not accepted: it moves no less memory, or computes something else."""
    # With the strides of use, which decide what is copied.
    inputs = [random_tensor(spec) for spec in rule.specs]
    if _moved(rule.replacement, inputs) >= 0.95 * _moved(rule.pattern, inputs):
        return "it moves no less memory"
    return why_different(rule.pattern, rule.replacement, rule.specs)


def _moved(expression: Expression, inputs: Sequence[torch.Tensor]) -> int:
    """Return how many elements the operators of an expression read and write."""
    counter = _Counter()
    with torch.no_grad(), counter:
        expression.run(inputs)
    return counter.elements


class _Counter(TorchDispatchMode):
    """Counts the elements that operators move, views apart; 16 more for each call."""

    elements: int = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if not is_view(regions.name_of(func)):
            leaves = torch.utils._pytree.tree_leaves((args, made))
            self.elements += 16 + sum(x.numel() for x in leaves if isinstance(x, torch.Tensor))
        return made


def find_rules(
    traced: fx.TracedGraph, store: RuleStore, *, max_ops: int = 2, budget_s: float = 60.0
) -> list[Rule]:
    """Search the patterns of a graph for cheaper replacements, and store the verdicts.

    Args:
        max_ops: functions in a replacement.
        budget_s: no search begins after this CPU time.

    Returns:
        The rules that were found; a later one may include the operators of an earlier one.
    """
    steps, until = regions.traced_steps(traced), time.process_time() + budget_s
    patterns = _distinct(traced, steps)
    covered = {n for place in known_places(traced, steps, store, []) for n in place.members}
    found: list[Rule] = []
    for effort in range(1, max_ops + 1):
        for unsolved, members in patterns:
            left_s = until - time.process_time()
            inside = members <= covered if effort == 1 else bool(members & covered)
            if left_s <= 0 or inside:
                continue
            rule = _search(unsolved, store, effort, min(_BUDGETS_S[effort - 1], left_s))
            if rule is not None:
                found.append(rule)
                covered |= members
    return found


def _distinct(traced: fx.TracedGraph, steps: Sequence[Step]) -> list[tuple[Rule, frozenset[int]]]:
    """Return patterns with distinct signatures as rules without effect, small ones first."""
    patterns: dict[str, tuple[Rule, frozenset[int]]] = {}
    for root, step in enumerate(steps):
        for members in regions.candidates(steps, root) if step.name else ():
            for variant in _VARIANTS:
                read = regions.pattern_of(traced, members, root, *variant)
                if read is None or (specs := _specs(read)) is None:
                    continue
                rows = regions.skeleton(steps, members, root)
                rule = Rule(read.expression, read.expression, rows, specs, variant)
                patterns.setdefault(rule.signature, (rule, members))
    return sorted(patterns.values(), key=lambda pattern: len(pattern[1]))


def _specs(pattern: Pattern) -> tuple[TensorSpec, ...] | None:
    specs = [fx.spec_of(node.meta.get("val")) for node in pattern.reads]
    concrete = tuple(spec for spec in specs if spec is not None)
    return concrete if len(concrete) == len(specs) else None


def _search(unsolved: Rule, store: RuleStore, effort: int, seconds: float) -> Rule | None:
    refuted = store.refuted(unsolved.signature)
    try:
        tried = 0
        for found in Enumeration(unsolved.pattern, unsolved.specs, effort, seconds).candidates():
            if found.key in refuted:
                continue
            rule = replace(unsolved, replacement=found)
            reason = why_unsuitable(rule)
            store.add(rule, reason)
            if reason is None:
                return rule
            tried += 1
            if tried == _MAX_REFUTED:
                return None
    except (RuntimeError, IndexError, ValueError):
        # Operators that cannot run on small inputs of other shapes.
        return None
    return None


@dataclass(frozen=True)
class Place:
    """A place in a traced graph that a rule replaces.

    Attributes:
        members: indices of its operations.
    """

    rule: Rule
    pattern: Pattern
    members: frozenset[int]


def known_places(
    traced: fx.TracedGraph, steps: Sequence[Step], store: RuleStore, reasons: list[str]
) -> Iterator[Place]:
    """Yield disjoint places that rules of the store replace, large ones first.

    A rule that was found with other numbers or dimensions is checked again.

    Args:
        reasons: extended by why rules were not used.
    """
    by_rows: dict[tuple[Row, ...], list[Rule]] = {}
    for rule in store.rules():
        by_rows.setdefault(rule.rows, []).append(rule)
    accepted = {rule.signature: rule for rules in by_rows.values() for rule in rules}
    taken: set[int] = set()
    checks = 0
    found = sorted(regions.matches_of(steps, by_rows), key=lambda place: -len(place[2]))
    for rows, root, members in found:
        for rule in () if taken & members else by_rows[rows]:
            read = regions.pattern_of(traced, members, root, *rule.variant)
            specs = None if read is None else _specs(read)
            if read is None or specs is None:
                continue
            again = replace(
                rule, pattern=read.expression, specs=specs,
                replacement=replace(rule.replacement, constants=read.expression.constants),
            )  # fmt: skip
            if again.signature not in accepted:
                same = [i.op for i in again.pattern.instructions] == [
                    i.op for i in rule.pattern.instructions
                ]
                refuted = store.refuted(again.signature)
                if not same or again.replacement.key in refuted or checks == _MAX_CHECKS:
                    continue
                checks += 1
                reason = why_unsuitable(again)
                store.add(again, reason)
                if reason is not None:
                    reasons.append(f"{again.replacement.source}: {reason}")
                    continue
                accepted[again.signature] = again
            taken |= members
            yield Place(accepted[again.signature], read, members)
            break


class Replaced(nn.Module):
    """A replacement, with the shape and strides of the operator's result that it replaces."""

    def __init__(self, expression: Expression, result: torch.Tensor) -> None:
        super().__init__()
        self.expression, self._shape = expression, tuple(result.shape)

    def extra_repr(self) -> str:
        return self.expression.source

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor]:
        return (self.expression.run(inputs).reshape(self._shape).contiguous(),)


def use_rules(model: object, store: RuleStore) -> tuple[list[str], list[str]]:
    """Route calls of `model` through torch.compile's tracer, with the rules of `store` applied.

    Returns:
        Lists that grow when the model runs: what was replaced, and why other rules were not used.

    Raises:
        WorkloadError: the model is already compiled.
    """
    replaced: list[str] = []

    def change(module: GraphModule) -> GraphModule | None:
        traced = fx.trace_of(module)
        places = [
            place
            for place in known_places(traced, regions.traced_steps(traced), store, backend.reasons)
            if place.pattern.root.meta["val"].is_contiguous()
        ]
        replacements = [
            fx.Replacement(
                Replaced(place.rule.replacement, place.pattern.root.meta["val"]),
                tuple(sorted(place.members)), place.pattern.reads,
                (traced.outputs[traced.nodes.index(place.pattern.root)][0],),
            )
            for place in places
        ]  # fmt: skip
        try:
            changed = fx.replace_regions(module, traced, replacements) if places else None
        except fx.CyclicReplacementError as error:
            backend.reasons.append(str(error))
            return None
        replaced.extend(place.rule.replacement.source for place in places)
        return changed

    backend = TracingBackend(change)
    put_compiled(model, backend=backend, dynamic=False)
    return replaced, backend.reasons
