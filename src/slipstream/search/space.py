"""Search spaces with conditions, derived values and rules, and their candidates.

A space is a tree of parameters with dotted names. Its canonical JSON determines its id. A candidate
consists of values of its *active* parameters, which identify it within the space.
"""

from __future__ import annotations

import graphlib
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream.errors import InvalidArgumentError, StoreError, UnknownNameError
from slipstream.search.expressions import Expression
from slipstream.search.parameters import Categorical, Parameter, parameter_from_json

# Number of consecutive forbidden draws after which a space is considered empty.
_MAX_DRAWS = 20_000
# Spaces up to this size are enumerated to check that the rules allow a candidate.
_MAX_ENUMERATED = 100_000


@dataclass(frozen=True)
class Choice:
    """A choice of one sub-space, whose parameters are the only active ones.

    Args:
        branches: parameters of each branch, by name; may be empty mappings.
    """

    branches: Mapping[str, Space | Mapping[str, Any]]

    def __init__(
        self, branches: Mapping[str, Space | Mapping[str, Any]] | None = None, **more: Any
    ) -> None:
        object.__setattr__(self, "branches", {**(branches or {}), **more})


@dataclass(frozen=True)
class Leaf:
    """A parameter and its position in a space.

    Attributes:
        path: dotted name.
        when: (path, value) of each enclosing choice; the parameter is active if all of them hold.
        at: offset of its numbers in the unit cube of the space.
    """

    path: str
    parameter: Parameter
    when: tuple[tuple[str, Any], ...]
    at: int


class Candidate:
    """Values of the active parameters of one space.

    Args:
        space: the space that it belongs to.
        values: values by path, sorted by path; None to parse them from `text` on first use.
        text: its `json`.
        id: its `id`; None to compute it on first use.
    """

    __slots__ = ("_id", "_json", "_values", "space")

    def __init__(
        self, space: Space, values: dict[str, Any] | None = None, *, text: str | None = None,
        id: bytes | None = None,
    ) -> None:  # fmt: skip
        self.space = space
        self._values = values
        self._json = text
        self._id = id

    @property
    def values(self) -> dict[str, Any]:
        """Values of active parameters by path, sorted by path."""
        if self._values is None:
            try:
                self._values = self.space.checked(json.loads(self._json or ""))
            except (ValueError, TypeError, RecursionError, LookupError) as error:
                what = getattr(error, "what", repr(error))
                raise StoreError(
                    f"a stored candidate is not valid in its space: {what}", where=self._json,
                    remedy="restore the study's file from a backup",
                ) from error  # fmt: skip
        return self._values

    @property
    def json(self) -> str:
        """Canonical JSON: paths sorted, numbers in their shortest form."""
        if self._json is None:
            self._json = _ENCODE(self.values)
        return self._json

    @property
    def id(self) -> bytes:
        """16 bytes: BLAKE2b of the space's id and `json`."""
        if self._id is None:
            digest = self.space.hasher.copy()
            digest.update(self.json.encode())
            self._id = digest.digest()
        return self._id

    @property
    def config(self) -> dict[str, Any]:
        """Values and derived values by path, as passed to an estimator."""
        config = dict(self.values)
        for path, rule in self.space.ties.items():
            if (value := rule(config)) is not None:
                config[path] = value
        return config

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Candidate) and self.id == other.id

    def __hash__(self) -> int:
        return hash(self.id)

    def __repr__(self) -> str:
        return f"Candidate({self.json})"


_ENCODE = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode
_Tree = list[tuple[Leaf, dict[Any, Any]]]


class Space:
    """Parameters under names, with conditions, derived values and rules.

        Space({"lr": Float(1e-4, 1e-1, log=True),
               "net": Choice(mlp={"width": Int(16, 512)}, cnn={"depth": Int(1, 8)})},
              forbid=["net.mlp.width > 256 and lr > 0.01"])

    Args:
        parameters: by name, a parameter, a `Choice`, or a group: a mapping or space.
        ties: derived values by name, each an expression over parameters.
        forbid: expressions; a candidate is not in the space if any of them is true.

    Raises:
        InvalidArgumentError: there are no parameters, a name is not an identifier, or ties derive
            from each other.
        UnknownNameError: a rule uses a parameter that is not in the space.
    """

    def __init__(
        self,
        parameters: Mapping[str, Any],
        *,
        ties: Mapping[str, str] | None = None,
        forbid: Sequence[str] = (),
    ) -> None:
        flat: dict[str, tuple[Parameter, tuple[tuple[str, Any], ...]]] = {}
        self.ties: dict[str, Expression] = {}
        rules: list[Expression] = []
        _flatten(parameters, "", (), flat, self.ties, rules)
        self.ties |= {path: Expression(text) for path, text in (ties or {}).items()}
        rules += [Expression(text) for text in forbid]
        self.forbid: tuple[Expression, ...] = tuple(rules)
        if not flat:
            raise InvalidArgumentError("space", "there are no parameters")
        leaves, at = [], 0
        for path in sorted(flat):
            parameter, when = flat[path]
            leaves.append(Leaf(path, parameter, when, at))
            at += parameter.units
        self.leaves: tuple[Leaf, ...] = tuple(leaves)
        self.units = at
        """Dimension of the unit cube that maps to candidates."""
        self._by_path = {leaf.path: leaf for leaf in leaves}
        names = [*self._by_path, *self.ties]
        for rule in (*self.ties.values(), *self.forbid):
            for path in rule.paths:
                if path not in names:
                    where = f"the rule '{rule.text}'"
                    raise UnknownNameError("parameter", path, names, where=where)
        for path in self.ties:
            if path in self._by_path:
                raise InvalidArgumentError("ties", f"'{path}' is already a parameter")
        self.ties = _in_order(self.ties)
        self._sources = {path: {path} for path in self._by_path}
        for path, tie in self.ties.items():
            self._sources[path] = set().union(*(self._sources[above] for above in tie.paths))
        self.hasher = hashlib.blake2b(self.id, digest_size=16)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Space:
        """Create a space from the result of `to_json`.

        Raises:
            InvalidArgumentError: `data` is malformed.
        """
        space = cls.__new__(cls)
        nested: dict[str, Any] = {}
        try:
            flat = {path: dict(leaf) for path, leaf in data["parameters"].items()}
            whens = {p: tuple(sorted(leaf.pop("when", {}).items())) for p, leaf in flat.items()}
            # Earlier versions stored the branches of a choice in the order of their definition.
            for above in {above for when in whens.values() for above, _ in when}:
                flat[above]["choices"] = sorted(flat[above]["choices"])
            parameters = {path: parameter_from_json(leaf) for path, leaf in flat.items()}
        except (KeyError, AttributeError, TypeError) as error:
            raise InvalidArgumentError("space", f"it is malformed: {error!r}") from None
        nested = {path: _Placed(parameters[path], whens[path]) for path in parameters}
        space.__init__(nested, ties=data.get("ties"), forbid=data.get("forbid", ()))  # type: ignore[misc]
        return space

    def to_json(self) -> dict[str, Any]:
        """Return the canonical JSON: parameters by path with their conditions, ties and rules."""
        parameters = {}
        for leaf in self.leaves:
            parameters[leaf.path] = leaf.parameter.to_json()
            if leaf.when:
                parameters[leaf.path]["when"] = dict(leaf.when)
        data: dict[str, Any] = {"parameters": parameters}
        if self.ties:
            data["ties"] = {path: self.ties[path].canonical for path in sorted(self.ties)}
        if self.forbid:
            data["forbid"] = sorted(rule.canonical for rule in self.forbid)
        return data

    @cached_property
    def id(self) -> bytes:
        """16 bytes: BLAKE2b of the canonical JSON."""
        text = json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"))
        return hashlib.blake2b(text.encode(), digest_size=16).digest()

    @property
    def names(self) -> tuple[str, ...]:
        """Paths of all parameters, sorted."""
        return tuple(self._by_path)

    def parameter(self, path: str) -> Parameter:
        """Return the parameter at `path`.

        Raises:
            UnknownNameError: no parameter has this path.
        """
        if path not in self._by_path:
            raise UnknownNameError("parameter", path, self._by_path)
        return self._by_path[path].parameter

    # Candidates

    def candidate(self, values: Mapping[str, Any]) -> Candidate:
        """Create a candidate; values of inactive parameters and ties are ignored.

        Raises:
            InvalidArgumentError: a value is missing, outside its range, or forbidden by a rule.
            UnknownNameError: a name is not a parameter.
        """
        candidate = Candidate(self, self.checked(values))
        if (broken := self.broken_rule(candidate)) is not None:
            raise InvalidArgumentError("candidate", f"the rule '{broken}' forbids it")
        return candidate

    def checked(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values of active parameters in canonical form, sorted by path.

        Raises:
            InvalidArgumentError: a value is missing or outside its range.
            UnknownNameError: a name is not a parameter.
        """
        for name in values:
            if name not in self._by_path and name not in self.ties:
                raise UnknownNameError("parameter", name, self._by_path)
        active: dict[str, Any] = {}
        for leaf in self.leaves:
            if not _active(leaf, active):
                continue
            if leaf.path not in values:
                raise InvalidArgumentError(leaf.path, "the value is missing")
            try:
                active[leaf.path] = leaf.parameter.checked(values[leaf.path])
            except (ValueError, TypeError) as error:
                raise InvalidArgumentError(leaf.path, str(error)) from None
        return active

    def load(self, text: str, id: bytes | None = None) -> Candidate:
        """Return the candidate with this `Candidate.json`, which is parsed on first use."""
        return Candidate(self, text=text, id=id)

    def from_units(self, u: Sequence[float]) -> Candidate:
        """Return the candidate at a point of the unit cube, float [units], ignoring rules."""
        values: dict[str, Any] = {}
        for leaf in self.leaves:
            if not leaf.when or _active(leaf, values):
                values[leaf.path] = leaf.parameter.from_units(
                    u[leaf.at : leaf.at + leaf.parameter.units]
                )
        return Candidate(self, values)

    def to_units(self, candidate: Candidate) -> NDArray[np.float64]:
        """Return a point that `from_units` maps to `candidate`, float [units]; 0.5 if inactive."""
        u = np.full(self.units, 0.5)
        for leaf in self.leaves:
            if leaf.path in candidate.values:
                units = leaf.parameter.to_units(candidate.values[leaf.path])
                u[leaf.at : leaf.at + len(units)] = units
        return u

    def broken_rule(self, candidate: Candidate) -> str | None:
        """Return the first rule that forbids `candidate`; None if it is allowed."""
        if not self.forbid:
            return None
        config = candidate.config if self.ties else candidate.values
        return next((rule.text for rule in self.forbid if rule(config)), None)

    def sample(self, rng: np.random.Generator) -> Candidate:
        """Draw a random candidate that all rules allow.

        Raises:
            InvalidArgumentError: each of 20,000 candidates drawn is forbidden.
        """
        for _ in range(_MAX_DRAWS):
            candidate = self.from_units(rng.random(self.units).tolist())
            if not self.forbid or self.broken_rule(candidate) is None:
                return candidate
        raise self._empty()

    def mutate(self, candidate: Candidate, rng: np.random.Generator) -> Candidate:
        """Return `candidate` with one active parameter changed; draw values of a new branch."""
        for _ in range(100):
            path = list(candidate.values)[int(rng.integers(len(candidate.values)))]
            near = self._by_path[path].parameter.neighbour(candidate.values[path], rng)
            mutant = self._completed({**candidate.values, path: near}, rng)
            if mutant != candidate and self.broken_rule(mutant) is None:
                return mutant
        return self.sample(rng)

    def crossover(self, first: Candidate, second: Candidate, rng: np.random.Generator) -> Candidate:
        """Return a candidate with each value taken from a random one of two parents."""
        for _ in range(20):
            mixed: dict[str, Any] = {}
            for leaf in self.leaves:
                parents = (first, second) if rng.random() < 0.5 else (second, first)
                for parent in parents:
                    if leaf.path in parent.values:
                        mixed[leaf.path] = parent.values[leaf.path]
                        break
            child = self._completed(mixed, rng)
            if self.broken_rule(child) is None:
                return child
        return first

    def _completed(self, values: Mapping[str, Any], rng: np.random.Generator) -> Candidate:
        """Select the values of active parameters, and draw missing ones."""
        active: dict[str, Any] = {}
        for leaf in self.leaves:
            if _active(leaf, active):
                active[leaf.path] = (
                    values[leaf.path]
                    if leaf.path in values
                    else leaf.parameter.from_units(rng.random(leaf.parameter.units).tolist())
                )
        return Candidate(self, active)

    # Counting

    @property
    def size(self) -> int | None:
        """Number of candidates, ignoring rules; None if infinite."""
        return _size(self._tree)

    def from_index(self, index: int) -> Candidate:
        """Return the candidate with this index, from 0 to `size` - 1, ignoring rules.

        Raises:
            InvalidArgumentError: the index is out of range, or the space is infinite.
        """
        if self.size is None or not 0 <= index < self.size:
            raise InvalidArgumentError(
                "index", f"{index} is out of range for {self.size} candidates"
            )
        values: dict[str, Any] = {}
        _from_index(self._tree, index, values)
        return Candidate(self, dict(sorted(values.items())))

    def to_index(self, candidate: Candidate) -> int:
        """Return the index of `candidate`; the inverse of `from_index`."""
        return _to_index(self._tree, candidate.values)

    def acceptance(self, n: int = 10_000, seed: int = 0) -> float:
        """Return the share of `n` random candidates that all rules allow."""
        if not self.forbid:
            return 1.0
        columns = self.sample_columns(n, np.random.default_rng(seed))
        return float(self.allowed(columns).mean())

    def check(self) -> None:
        """Check that the rules allow at least one candidate.

        Raises:
            InvalidArgumentError: all candidates are forbidden, or each of 20,000 drawn.
        """
        if not self.forbid:
            return
        size = self.size
        if size is not None and size <= _MAX_ENUMERATED:
            candidates = map(self.from_index, range(size))
            if not any(self.broken_rule(candidate) is None for candidate in candidates):
                raise self._empty(f"each of its {size} candidates is forbidden")
        elif self.acceptance(_MAX_DRAWS) == 0.0:
            raise self._empty()

    def _empty(self, why: str = f"each of {_MAX_DRAWS} candidates drawn is forbidden") -> Exception:
        rules = "; ".join(rule.text for rule in self.forbid)
        return InvalidArgumentError(
            "space", f"it is empty: {why}", where=f"the rules {rules}",
            remedy="remove or relax rules that contradict each other",
        )  # fmt: skip

    # Arrays of candidates

    def sample_columns(self, n: int, rng: np.random.Generator) -> dict[str, NDArray[Any]]:
        """Draw `n` random candidates, as an array [n] of values for each path, ignoring rules.

        Inactive parameters have values too; see `active`.
        """
        return {
            leaf.path: leaf.parameter.column(rng.random((n, leaf.parameter.units)))
            for leaf in self.leaves
        }

    def active(self, columns: Mapping[str, NDArray[Any]], path: str) -> NDArray[np.bool_]:
        """Return a mask of the candidates in which the parameter at `path` is active, bool [n]."""
        n = len(next(iter(columns.values())))
        mask = np.ones(n, dtype=np.bool_)
        for above, value in self._by_path[path].when if path in self._by_path else ():
            mask &= columns[above] == value
        return mask

    def allowed(self, columns: Mapping[str, NDArray[Any]]) -> NDArray[np.bool_]:
        """Return a mask of the candidates that all rules allow, bool [n]."""
        n = len(next(iter(columns.values())))
        extended = dict(columns)
        for path, tie in self.ties.items():
            extended[path] = tie.over(extended)
        allowed = np.ones(n, dtype=np.bool_)
        for rule in self.forbid:
            # A rule applies only if all of its parameters are active.
            applies = np.ones(n, dtype=np.bool_)
            for path in rule.paths:
                for inner in self._sources[path]:
                    applies &= self.active(columns, inner)
            allowed &= ~(applies & np.asarray(rule.over(extended), dtype=np.bool_))
        return allowed

    def encode(self, columns: Mapping[str, NDArray[Any]]) -> NDArray[np.float32]:
        """Map candidates to points of the unit cube, float32 [n, units]; NaN if inactive."""
        n = len(next(iter(columns.values())))
        points = np.empty((n, self.units), dtype=np.float32)
        for leaf in self.leaves:
            part = points[:, leaf.at : leaf.at + leaf.parameter.units]
            part[:] = leaf.parameter.unit_column(columns[leaf.path])
            if leaf.when:
                part[~self.active(columns, leaf.path)] = np.nan
        return points

    def row(self, columns: Mapping[str, NDArray[Any]], at: int) -> Candidate:
        """Return the candidate in row `at` of `columns`."""
        values: dict[str, Any] = {}
        for leaf in self.leaves:
            if _active(leaf, values):
                value = columns[leaf.path][at]
                values[leaf.path] = value.item() if isinstance(value, np.generic) else value
        return Candidate(self, values)

    @cached_property
    def _tree(self) -> _Tree:
        def under(when: tuple[tuple[str, Any], ...]) -> _Tree:
            subtree: _Tree = []
            for leaf in self.leaves:
                if leaf.when == when:
                    branches = {}
                    if isinstance(leaf.parameter, Categorical):
                        deeper = {(leaf.path, choice) for choice in leaf.parameter.choices}
                        if any(deeper & set(other.when) for other in self.leaves):
                            for choice in leaf.parameter.choices:
                                inner = tuple(sorted((*when, (leaf.path, choice))))
                                branches[choice] = under(inner)
                    subtree.append((leaf, branches))
            return subtree

        return under(())


@dataclass(frozen=True)
class _Placed:
    """A parameter with its conditions, as in the JSON of a space."""

    parameter: Parameter
    when: tuple[tuple[str, Any], ...]


def _flatten(
    parameters: Mapping[str, Any],
    prefix: str,
    when: tuple[tuple[str, Any], ...],
    flat: dict[str, tuple[Parameter, tuple[tuple[str, Any], ...]]],
    ties: dict[str, Expression],
    rules: list[Expression],
) -> None:
    for name, value in parameters.items():
        path = f"{prefix}{name}"
        if isinstance(value, _Placed):
            flat[path] = (value.parameter, value.when)
            continue
        if not (isinstance(name, str) and name.isidentifier()):
            raise InvalidArgumentError(
                "space", f"'{name}' is not a valid name for use in rules", where=path,
                remedy="use letters, digits and underscores, starting with a letter",
            )  # fmt: skip
        if isinstance(value, Parameter):
            flat[path] = (value, when)
        elif isinstance(value, Choice):
            if not value.branches:
                raise InvalidArgumentError("space", "a Choice has no branches", where=path)
            flat[path] = (Categorical(tuple(sorted(value.branches, key=str))), when)
            for branch, inner in value.branches.items():
                condition = tuple(sorted((*when, (path, branch))))
                _flatten({branch: inner}, f"{path}.", condition, flat, ties, rules)
        elif isinstance(value, Space):
            below = f"{path}."
            for leaf in value.leaves:
                moved = tuple(sorted([*when, *((below + above, v) for above, v in leaf.when)]))
                flat[below + leaf.path] = (leaf.parameter, moved)
            ties |= {below + tie: Expression(e.text, below) for tie, e in value.ties.items()}
            rules += [Expression(rule.text, below) for rule in value.forbid]
        elif isinstance(value, Mapping):
            _flatten(value, f"{path}.", when, flat, ties, rules)
        else:
            raise InvalidArgumentError(
                "space", f"{type(value).__name__} is not a parameter", where=path,
                remedy="use Float, Int, Bool, Categorical, Permutation, Subset, Sequence or Choice",
            )  # fmt: skip


def _in_order(ties: Mapping[str, Expression]) -> dict[str, Expression]:
    """Sort ties so that each follows the ties it derives from."""
    graph = {path: [above for above in ties[path].paths if above in ties] for path in sorted(ties)}
    try:
        return {path: ties[path] for path in graphlib.TopologicalSorter(graph).static_order()}
    except graphlib.CycleError as error:
        raise InvalidArgumentError(
            "ties", f"they derive from each other: {' -> '.join(error.args[1])}",
            remedy="derive every tie from parameters, directly or through other ties",
        ) from None  # fmt: skip


def _active(leaf: Leaf, values: Mapping[str, Any]) -> bool:
    return all(above in values and values[above] == value for above, value in leaf.when)


def _size(tree: _Tree) -> int | None:
    total = 1
    for leaf, branches in tree:
        sizes = [_size(inner) for inner in branches.values()] if branches else [leaf.parameter.size]
        finite = [size for size in sizes if size is not None]
        if len(finite) < len(sizes):
            return None
        total *= sum(finite)
    return total


def _from_index(tree: _Tree, index: int, values: dict[str, Any]) -> None:
    for leaf, branches in tree:
        if not branches:
            index, digit = divmod(index, leaf.parameter.size or 1)
            values[leaf.path] = leaf.parameter.from_index(digit)
            continue
        sizes = {choice: _size(inner) or 1 for choice, inner in branches.items()}
        index, digit = divmod(index, sum(sizes.values()))
        for choice, inner in branches.items():
            if digit < sizes[choice]:
                values[leaf.path] = choice
                _from_index(inner, digit, values)
                break
            digit -= sizes[choice]


def _to_index(tree: _Tree, values: Mapping[str, Any]) -> int:
    index, scale = 0, 1
    for leaf, branches in tree:
        value = values[leaf.path]
        if not branches:
            digit, radix = leaf.parameter.to_index(value), leaf.parameter.size or 1
        else:
            sizes = {choice: _size(inner) or 1 for choice, inner in branches.items()}
            radix = sum(sizes.values())
            choices = list(branches)
            preceding = choices[: choices.index(value)]
            digit = sum(sizes[choice] for choice in preceding) + _to_index(branches[value], values)
        index += scale * digit
        scale *= radix
    return index


def every(space: Space) -> Iterator[Candidate]:
    """Yield all allowed candidates of a finite space, in the order of their indices.

    Raises:
        InvalidArgumentError: the space is infinite.
    """
    if space.size is None:
        raise InvalidArgumentError(
            "space", "a grid needs a finite space",
            remedy="give each Float a step, or use Int or Categorical instead",
        )  # fmt: skip
    for index in range(space.size):
        candidate = space.from_index(index)
        if space.broken_rule(candidate) is None:
            yield candidate
