"""Rules: patterns with their replacements, searched for in a model and stored for the next one.

The store also has the replacements that a check refuted, so that none is offered again with the
same version of torch, and the patterns whose search found nothing.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from slipstream.capture import put_compiled
from slipstream.durations.durations import cache_folder, machine_key
from slipstream.errors import SlipstreamError
from slipstream.graph import TensorSpec
from slipstream.graph.call import decode, encode
from slipstream.sqlite import errors_in_words, open_database
from slipstream.surgery import fx
from slipstream.techniques.rewrite import regions
from slipstream.techniques.rewrite.expression import Expression, is_view
from slipstream.techniques.rewrite.regions import Pattern, Row, Step
from slipstream.techniques.rewrite.search import Enumeration
from slipstream.techniques.rewrite.timing import gains
from slipstream.techniques.rewrite.tracing import TracingBackend
from slipstream.techniques.rewrite.verify import why_different

# Values of `at_base` and `viewed` that patterns are read with.
_VARIANTS = ((False, False), (False, True), (True, False))
# CPU seconds per pattern for a search of 1, 2, ... functions.
_BUDGETS_S = (0.5, 2.0, 6.0, 10.0)
_MAX_REFUTED = 3
_MAX_CHECKS = 8
_MIN_GAIN = 1.05
_TABLES = ("CREATE TABLE result (key TEXT PRIMARY KEY, value TEXT NOT NULL);",)


@dataclass(frozen=True)
class Rule:
    """A pattern and a replacement that was checked.

    Attributes:
        rows: wiring of the pattern's operators, to find it in other models.
        specs: inputs of the pattern where it was found.
        variant: how its expression was read: `at_base` and `viewed` of `pattern_of`.
        gains: time of the pattern over that of the replacement on `specs`: forward pass, and
            forward with backward pass.
    """

    pattern: Expression
    replacement: Expression
    rows: tuple[Row, ...]
    specs: tuple[TensorSpec, ...]
    variant: tuple[bool, bool] = (False, False)
    gains: tuple[float, float] = (0.0, 0.0)

    def is_faster(self, training: bool) -> bool:
        """Whether the replacement is worth it in a step with or without backward pass."""
        return self.gains[training] >= _MIN_GAIN

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

    @property
    def key(self) -> str:
        """The identity of the rule."""
        return json.dumps([self.signature, self.replacement.key])

    def to_json(self) -> list[Any]:
        expressions = self.pattern.to_json(), self.replacement.to_json()
        return [*expressions, self.rows, encode(list(self.specs)), self.variant, self.gains]

    @classmethod
    def from_json(cls, value: list[Any]) -> Rule:
        pattern, replacement, rows, specs, (at_base, viewed), (forward, both) = value
        return cls(
            Expression.from_json(pattern), Expression.from_json(replacement),
            tuple((name, tuple(dims), tuple(operands)) for name, dims, operands in rows),
            tuple(decode(specs)), (at_base, viewed), (forward, both),
        )  # fmt: skip


class RuleStore:
    """Results of searches on this machine with this version of torch: a file that survives kill -9.

    Args:
        path: a database; in the folder of cached measurements by default.
        report: called with the key and the value of each new result, for another process to
            `save`; a workload's child process must not write the file. None to write it here.

    Attributes:
        fruitless: keys of searches that found nothing.

    Raises:
        SlipstreamError: the file has a rule that is not one on operators of this torch.
    """

    def __init__(
        self, path: Path | None = None, report: Callable[[str, Any], None] | None = None
    ) -> None:
        self._path = path or cache_folder() / f"rewrites-{machine_key()}.db"
        self._report = report or self.save
        self._verdicts: dict[str, tuple[Rule, str | None]] = {}
        self.fruitless: set[str] = set()
        if not self._path.exists():
            return
        with errors_in_words(self._path), closing(open_database(self._path, _TABLES)) as database:
            rows = database.execute("SELECT key, value FROM result ORDER BY rowid").fetchall()
        try:
            for key, value in rows:
                self._insert(key, json.loads(value))
        except (AttributeError, TypeError, ValueError, LookupError) as error:
            what, remedy = f"a stored rule cannot be read: {error}", "delete it, and search again"
            raise SlipstreamError(what, where=str(self._path), remedy=remedy) from error

    def _insert(self, key: str, value: Any) -> None:
        if value is None:
            self.fruitless.add(key)
        else:
            self._verdicts[key] = Rule.from_json(value[0]), value[1]

    def rules(self) -> list[Rule]:
        """Return the accepted rules."""
        return [rule for rule, refuted in self._verdicts.values() if refuted is None]

    def is_refuted(self, rule: Rule) -> bool:
        """Whether a check refuted the replacement before."""
        return self._verdicts.get(rule.key, (rule, None))[1] is not None

    def add(self, rule: Rule, refuted: str | None = None) -> None:
        """Add a rule, or why its replacement was refuted."""
        self._verdicts[rule.key] = rule, refuted
        self._report(rule.key, [rule.to_json(), refuted])

    def add_fruitless(self, key: str) -> None:
        """Add a search that found nothing."""
        self.fruitless.add(key)
        self._report(key, None)

    def save(self, key: str, value: Any) -> None:
        """Write a result to the file, of this process or another's `report`."""
        self._insert(key, value)
        with errors_in_words(self._path), closing(open_database(self._path, _TABLES)) as database:
            row = key, json.dumps(value)
            database.execute("INSERT OR REPLACE INTO result VALUES (?, ?)", row)


def _judged(rule: Rule, store: RuleStore) -> Rule | None:
    """Time and check a rule; return it with its gains, or None if it is slower or wrong.

    The store gets the verdict of the check. A rule that is slower may be faster for other sizes.
    """
    if not any(rule.gains):
        rule = replace(rule, gains=gains(rule.pattern, rule.replacement, rule.specs))
    if not (rule.is_faster(False) or rule.is_faster(True)):
        return None
    reason = why_different(rule.pattern, rule.replacement, rule.specs)
    store.add(rule, reason)
    return rule if reason is None else None


def find_rules(
    traced: fx.TracedGraph,
    store: RuleStore,
    *,
    max_ops: int = 2,
    budget_s: float = 60.0,
    report: Callable[[str], None] = lambda line: None,
) -> list[Rule]:
    """Search the patterns of a graph for cheaper replacements, and store the verdicts.

    Args:
        max_ops: functions in a replacement.
        budget_s: no search begins after this CPU time.
        report: called with a line of progress.

    Returns:
        The rules that were found; a later one may include the operators of an earlier one.
    """
    steps, until = regions.traced_steps(traced), time.process_time() + budget_s
    patterns = _distinct(traced, steps)
    covered = [place.members for place in known_places(traced, steps, store)]
    found: list[Rule] = []
    for effort in range(1, max_ops + 1):
        for n, (unsolved, members) in enumerate(patterns):
            report(f"length {effort}: pattern {n + 1} of {len(patterns)}, {len(found)} found")
            left_s = until - time.process_time()
            inside = any(members <= c if effort == 1 else members & c for c in covered)
            if left_s <= 0 or inside:
                continue
            # A replacement that is slower here may be faster for other sizes.
            sizes = [spec.shape for spec in unsolved.specs]
            key = json.dumps([unsolved.signature, sizes, effort])
            if key in store.fruitless:
                continue
            rule = _search(unsolved, store, effort, min(_BUDGETS_S[effort - 1], left_s))
            if rule is not None:
                found.append(rule)
                covered.append(members)
            elif left_s > _BUDGETS_S[effort - 1]:
                store.add_fruitless(key)
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
    """Return the specs of the inputs; None if one has symbolic sizes or is on another device.

    Rules are timed and checked on the CPU.
    """
    specs = [fx.spec_of(node.meta.get("val")) for node in pattern.reads]
    concrete = tuple(spec for spec in specs if spec is not None and spec.device == "cpu")
    return concrete if len(concrete) == len(specs) else None


def _search(unsolved: Rule, store: RuleStore, effort: int, seconds: float) -> Rule | None:
    try:
        tried = 0
        for found in Enumeration(unsolved.pattern, unsolved.specs, effort, seconds).candidates():
            rule = replace(unsolved, replacement=found)
            if store.is_refuted(rule):
                continue
            if (judged := _judged(rule, store)) is not None:
                return judged
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
        specs: inputs of the pattern in this graph.
    """

    rule: Rule
    pattern: Pattern
    members: frozenset[int]
    specs: tuple[TensorSpec, ...]


def known_places(
    traced: fx.TracedGraph, steps: Sequence[Step], store: RuleStore, training: bool | None = None
) -> Iterator[Place]:
    """Yield disjoint places that rules of the store replace, large ones first.

    A rule that was found with other numbers or dimensions is checked again, one with another dtype
    also timed.

    Args:
        training: whether they must be faster with a backward pass, or without; None for either.
    """
    by_rows: dict[tuple[Row, ...], list[Rule]] = {}
    for rule in store.rules():
        if training is None or rule.is_faster(training):
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
            same_dtypes = all(a.dtype == b.dtype for a, b in zip(specs, rule.specs, strict=False))
            again = replace(
                rule, pattern=read.expression, specs=specs,
                replacement=replace(rule.replacement, constants=read.expression.constants),
                gains=rule.gains if same_dtypes else (0.0, 0.0),
            )  # fmt: skip
            if again.signature not in accepted:
                ops, others = ([i.op for i in each.pattern.instructions] for each in (again, rule))
                if ops != others or store.is_refuted(again) or checks == _MAX_CHECKS:
                    continue
                checks += 1
                if _judged(again, store) is None:
                    continue
                accepted[again.signature] = again
            taken |= members
            yield Place(accepted[again.signature], read, members, specs)
            break


class Replaced(nn.Module):
    """A replacement, with the shape and strides of the operator's result that it replaces."""

    def __init__(self, expression: Expression, result: torch.Tensor) -> None:
        super().__init__()
        self.expression, self._shape = expression, tuple(result.shape)

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor]:
        return (self.expression.run(inputs).reshape(self._shape).contiguous(),)


def use_rules(
    model: object, store: RuleStore, training: bool | None = None
) -> tuple[list[str], list[str]]:
    """Route calls of `model` through torch.compile's tracer, with the rules of `store` applied.

    Args:
        training: see `known_places`.

    Returns:
        Lists that grow when the model runs: what was replaced, and why graphs stayed unchanged.

    Raises:
        WorkloadError: the model is already compiled.
    """
    replaced: list[str] = []

    def change(module: GraphModule) -> GraphModule | None:
        traced = fx.trace_of(module)
        found = known_places(traced, regions.traced_steps(traced), store, training)
        places = [place for place in found if place.pattern.root.meta["val"].is_contiguous()]
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
        return None if changed is None else fx.simplify(changed)

    backend = TracingBackend(change)
    put_compiled(model, backend=backend, dynamic=False)
    return replaced, backend.reasons
