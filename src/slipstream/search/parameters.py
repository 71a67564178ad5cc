"""Parameters: numbers, choices, permutations, subsets, sequences.

Every parameter maps numbers of the unit interval to its values, from which random, quasi-random and
mutated candidates are built. A finite parameter also maps its values to 0, 1, 2, ...
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, fields
from decimal import Decimal
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from slipstream.errors import InvalidArgumentError

_BELOW_ONE = math.nextafter(1.0, 0.0)


class Parameter(ABC):
    """A variable of a search space."""

    kind: ClassVar[str]
    units: int = 1
    """Count of unit-interval numbers that determine a value."""

    @property
    @abstractmethod
    def size(self) -> int | None:
        """Number of values; None if infinite."""

    @abstractmethod
    def from_units(self, u: Seq[float]) -> Any:
        """Return the value at `units` numbers in [0, 1)."""

    @abstractmethod
    def to_units(self, value: Any) -> list[float]:
        """Return numbers that `from_units` maps to `value`."""

    @abstractmethod
    def checked(self, value: Any) -> Any:
        """Return `value` in its canonical form.

        Raises:
            ValueError: it is not a value of this parameter.
        """

    @abstractmethod
    def from_index(self, index: int) -> Any:
        """Return the value with this index, from 0 to `size` - 1."""

    @abstractmethod
    def to_index(self, value: Any) -> int:
        """Return the index of `value`."""

    def neighbour(self, value: Any, rng: np.random.Generator) -> Any:
        """Return a different value near `value`; `value` if none is found."""
        u = self.to_units(value)
        at = int(rng.integers(len(u)))
        for _ in range(16):
            u[at] = _reflected(u[at] + float(rng.normal(0.0, 0.2)))
            if (near := self.from_units(u)) != value:
                return near
        return value

    def column(self, u: NDArray[np.float64]) -> NDArray[Any]:
        """Map unit-interval numbers [n, units] to values [n], numeric or object."""
        values = np.empty(len(u), dtype=object)
        values[:] = [self.from_units(row) for row in u.tolist()]
        return values

    def unit_column(self, column: NDArray[Any]) -> NDArray[np.float64]:
        """Map values [n] to unit-interval numbers [n, units]."""
        return np.array([self.to_units(value) for value in column], dtype=np.float64)

    def to_json(self) -> dict[str, Any]:
        """Return the kind and the settings that differ from their defaults."""
        settings = {f.name: getattr(self, f.name) for f in fields(self)}  # type: ignore[arg-type]
        default = {f.name: f.default for f in fields(self)}  # type: ignore[arg-type]
        changed = {k: v for k, v in settings.items() if v is not default[k] and v != default[k]}
        return {"kind": self.kind, **changed}


def _reflected(u: float) -> float:
    u = abs(u) % 2.0
    return min(2.0 - u if u > 1.0 else u, _BELOW_ONE)


def _bounds(kind: str, lo: float, hi: float, log: bool) -> None:
    if not (math.isfinite(lo) and math.isfinite(hi)):
        raise InvalidArgumentError(kind, f"bounds {lo} and {hi} are not finite")
    if lo > hi:
        raise InvalidArgumentError(kind, f"the range from {lo} to {hi} is empty; swap its bounds")
    if log and lo <= 0:
        raise InvalidArgumentError(kind, f"a logarithmic range cannot start at {lo}; use lo > 0")


@dataclass(frozen=True)
class Float(Parameter):
    """A real number in [lo, hi].

    Args:
        log: whether to sample uniformly in the logarithm.
        step: restricts the values to lo, lo + step, ..., up to hi; not supported with `log`.
    """

    kind = "float"
    lo: float
    hi: float
    log: bool = False
    step: float | None = None

    def __post_init__(self) -> None:
        _bounds("Float", self.lo, self.hi, self.log)
        object.__setattr__(self, "lo", float(self.lo))
        object.__setattr__(self, "hi", float(self.hi))
        if self.step is None:
            return
        object.__setattr__(self, "step", float(self.step))
        if not (self.step > 0 and math.isfinite(self.step)):
            raise InvalidArgumentError("Float", f"step={self.step} is not positive and finite")
        if self._count > 2**53:
            raise InvalidArgumentError("Float", f"step={self.step} is too small for the range")
        if self.log:
            raise InvalidArgumentError(
                "Float", "log and step cannot be combined", remedy="pass log=True or step="
            )

    @property
    def size(self) -> int | None:
        if self.step is None:
            return 1 if self.lo == self.hi else None
        return self._count

    @cached_property
    def _count(self) -> int:
        # Decimal, since (0.3 - 0.1) / 0.1 is less than 2 in float.
        low, high, step = (Decimal(repr(value)) for value in (self.lo, self.hi, self.step))
        return int((high - low) / step) + 1

    def from_units(self, u: Seq[float]) -> float:
        if self.step is not None:
            return self.from_index(int(u[0] * self._count))
        if self.log:
            value = self.lo * (self.hi / self.lo) ** u[0]
        else:
            value = self.lo + u[0] * (self.hi - self.lo)
        # Rounding may leave the range; adding 0.0 turns -0.0, a separate candidate, into 0.0.
        return float(min(max(value, self.lo), self.hi)) + 0.0

    def to_units(self, value: Any) -> list[float]:
        if self.lo == self.hi:
            return [0.5]
        if self.step is not None:
            return [(self.to_index(value) + 0.5) / self._count]
        if self.log:
            return [min(math.log(value / self.lo) / math.log(self.hi / self.lo), _BELOW_ONE)]
        return [min((value - self.lo) / (self.hi - self.lo), _BELOW_ONE)]

    def checked(self, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float | np.number):
            raise ValueError(f"{value!r} is not a number")
        number = float(value)
        if not self.lo <= number <= self.hi:
            raise ValueError(f"{number} is outside the range {self.lo} to {self.hi}")
        if self.step is None:
            return number + 0.0
        stepped = self.from_index(min(self.to_index(number), self._count - 1))
        if not math.isclose(number, stepped, rel_tol=1e-9, abs_tol=1e-9 * self.step):
            raise ValueError(f"{number} is not {self.lo} plus a multiple of the step {self.step}")
        return stepped

    def from_index(self, index: int) -> float:
        if self.step is None:
            return self.lo
        return float(Decimal(repr(self.lo)) + index * Decimal(repr(self.step))) + 0.0

    def to_index(self, value: Any) -> int:
        return 0 if self.step is None else round((value - self.lo) / self.step)

    def column(self, u: NDArray[np.float64]) -> NDArray[Any]:
        if self.step is not None:
            at, where = np.unique((u[:, 0] * self._count).astype(int), return_inverse=True)
            return np.array([self.from_index(index) for index in at.tolist()])[where]
        if self.log:
            values = self.lo * (self.hi / self.lo) ** u[:, 0]
        else:
            values = self.lo + u[:, 0] * (self.hi - self.lo)
        return np.clip(values, self.lo, self.hi) + 0.0

    def unit_column(self, column: NDArray[Any]) -> NDArray[np.float64]:
        if self.lo == self.hi:
            return np.full((len(column), 1), 0.5)
        if self.step is not None:
            at = np.rint((column - self.lo) / self.step)
            return np.asarray((at + 0.5) / self._count)[:, None]
        if self.log:
            u = np.log(column / self.lo) / math.log(self.hi / self.lo)
        else:
            u = (column - self.lo) / (self.hi - self.lo)
        return np.asarray(np.minimum(u, _BELOW_ONE))[:, None]


class _Finite(Parameter):
    """A finite parameter, which divides the unit interval into equal parts by default."""

    @property
    @abstractmethod
    def count(self) -> int:
        """Number of values."""

    @property
    def size(self) -> int:
        return self.count

    def from_units(self, u: Seq[float]) -> Any:
        return self.from_index(int(u[0] * self.count))

    def to_units(self, value: Any) -> list[float]:
        return [(self.to_index(value) + 0.5) / self.count]


@dataclass(frozen=True)
class Int(_Finite):
    """An integer lo, lo + step, ..., up to hi; `log` samples uniformly in the logarithm."""

    kind = "int"
    lo: int
    hi: int
    step: int = 1
    log: bool = False

    def __post_init__(self) -> None:
        _bounds("Int", self.lo, self.hi, self.log)
        for name in ("lo", "hi", "step"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise InvalidArgumentError("Int", f"{name}={value!r} is not an integer")
        if self.step < 1:
            raise InvalidArgumentError("Int", f"step={self.step} is not positive")

    @property
    def count(self) -> int:
        return (self.hi - self.lo) // self.step + 1

    def from_units(self, u: Seq[float]) -> int:
        if not self.log:
            return self.lo + self.step * int(u[0] * self.count)
        low, high = self.lo - 0.5 * min(1, self.step), self.hi + 0.5
        value = low * (high / low) ** u[0]
        at = round((value - self.lo) / self.step)
        return int(self.lo + self.step * min(max(at, 0), self.count - 1))

    def to_units(self, value: Any) -> list[float]:
        if not self.log:
            return super().to_units(value)
        low, high = self.lo - 0.5 * min(1, self.step), self.hi + 0.5
        return [min(math.log(value / low) / math.log(high / low), _BELOW_ONE)]

    def checked(self, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int | np.integer):
            raise ValueError(f"{value!r} is not an integer")
        number = int(value)
        if not self.lo <= number <= self.hi or (number - self.lo) % self.step:
            by = f" in steps of {self.step}" if self.step > 1 else ""
            raise ValueError(f"{number} is not in the range {self.lo} to {self.hi}{by}")
        return number

    def from_index(self, index: int) -> int:
        return self.lo + self.step * index

    def to_index(self, value: Any) -> int:
        return int((value - self.lo) // self.step)

    def neighbour(self, value: Any, rng: np.random.Generator) -> int:
        at, last = self.to_index(value), self.count - 1
        jump = int(rng.geometric(0.5)) * (1 if rng.random() < 0.5 else -1)
        to = min(max(at + jump, 0), last)
        return self.from_index(to if to != at else min(max(at - jump, 0), last))

    def column(self, u: NDArray[np.float64]) -> NDArray[Any]:
        if not self.log:
            at = (u[:, 0] * self.count).astype(np.int64)
        else:
            low, high = self.lo - 0.5 * min(1, self.step), self.hi + 0.5
            value = low * (high / low) ** u[:, 0]
            at = np.clip(np.rint((value - self.lo) / self.step), 0, self.count - 1).astype(np.int64)
        return self.lo + self.step * at

    def unit_column(self, column: NDArray[Any]) -> NDArray[np.float64]:
        if self.log:
            low, high = self.lo - 0.5 * min(1, self.step), self.hi + 0.5
            u = np.log(column / low) / math.log(high / low)
            return np.asarray(np.minimum(u, _BELOW_ONE))[:, None]
        return np.asarray(((column - self.lo) // self.step + 0.5) / self.count)[:, None]


@dataclass(frozen=True)
class Categorical(_Finite):
    """One of `choices`: strings, numbers, booleans, None, or lists of these.

    Args:
        ordered: whether adjacent choices are similar, as in a list of sizes.
    """

    kind = "categorical"
    choices: tuple[Any, ...]
    ordered: bool = False

    def __post_init__(self) -> None:
        choices = tuple(tuple(c) if isinstance(c, list) else c for c in self.choices)
        object.__setattr__(self, "choices", choices)
        if not choices:
            raise InvalidArgumentError("Categorical", "choices is empty")
        try:
            written = {json.dumps(choice): at for at, choice in enumerate(choices)}
        except TypeError as error:
            raise InvalidArgumentError(
                "Categorical", f"a choice cannot be written as JSON: {error}",
                remedy="use names as choices, and look the values up in your function",
            ) from None  # fmt: skip
        if len(written) < len(choices):
            raise InvalidArgumentError("Categorical", f"{list(choices)} contains a choice twice")
        distinct = len(set(choices)) == len(choices)
        object.__setattr__(self, "_written", written)
        object.__setattr__(self, "_indices", dict(zip(choices, range(len(choices)), strict=True))
                           if distinct else None)  # fmt: skip

    @property
    def count(self) -> int:
        return len(self.choices)

    def checked(self, value: Any) -> Any:
        at = self._at(value)
        if at is None:
            raise ValueError(f"{value!r} is not one of {list(self.choices)}")
        return self.choices[at]

    def from_index(self, index: int) -> Any:
        return self.choices[index]

    def to_index(self, value: Any) -> int:
        at = self._at(value)
        if at is None:
            raise ValueError(f"{value!r} is not one of {list(self.choices)}")
        return at

    def _at(self, value: Any) -> int | None:
        # By JSON, since 1, 1.0 and True are equal in Python but distinct choices.
        if isinstance(value, np.generic):
            value = value.item()
        try:
            index: int | None = self._written.get(json.dumps(value))  # type: ignore[attr-defined]
        except TypeError:
            return None
        return index

    def neighbour(self, value: Any, rng: np.random.Generator) -> Any:
        at, count = self.to_index(value), self.count
        if count == 1:
            return value
        if self.ordered:
            to = at + (1 if rng.random() < 0.5 else -1)
            return self.choices[to if 0 <= to < count else 2 * at - to]
        return self.choices[(at + 1 + int(rng.integers(count - 1))) % count]

    def column(self, u: NDArray[np.float64]) -> NDArray[Any]:
        values = np.array(self.choices)
        if len({type(choice) for choice in self.choices}) > 1 or values.ndim != 1:
            values = np.empty(self.count, dtype=object)
            values[:] = self.choices
        return values[(u[:, 0] * self.count).astype(np.int64)]

    def unit_column(self, column: NDArray[Any]) -> NDArray[np.float64]:
        if column.dtype == object or self._indices is None:  # type: ignore[attr-defined]
            return super().unit_column(column)
        values = np.array(self.choices)
        order = np.argsort(values)
        at = order[np.searchsorted(values[order], column)]
        return np.asarray((at + 0.5) / self.count)[:, None]


@dataclass(frozen=True)
class Bool(Categorical):
    """True or false."""

    kind = "bool"
    choices: tuple[Any, ...] = (False, True)


@dataclass(frozen=True)
class Permutation(Parameter):
    """A permutation of 0 .. n - 1."""

    kind = "permutation"
    n: int

    def __post_init__(self) -> None:
        if self.n < 1:
            raise InvalidArgumentError("Permutation", f"n={self.n} is not positive")
        object.__setattr__(self, "units", self.n)

    @property
    def size(self) -> int:
        return math.factorial(self.n)

    def from_units(self, u: Seq[float]) -> tuple[int, ...]:
        return tuple(sorted(range(self.n), key=u.__getitem__))

    def to_units(self, value: Any) -> list[float]:
        u = [0.0] * self.n
        for rank, item in enumerate(value):
            u[item] = (rank + 0.5) / self.n
        return u

    def checked(self, value: Any) -> tuple[int, ...]:
        order = tuple(value)
        if sorted(order) != list(range(self.n)):
            raise ValueError(f"{order} is not a permutation of 0 to {self.n - 1}")
        return tuple(int(item) for item in order)

    def from_index(self, index: int) -> tuple[int, ...]:
        remaining, order = list(range(self.n)), []
        for at in range(self.n - 1, -1, -1):
            digit, index = divmod(index, math.factorial(at))
            order.append(remaining.pop(digit))
        return tuple(order)

    def to_index(self, value: Any) -> int:
        remaining, index = list(range(self.n)), 0
        for at, item in enumerate(value):
            digit = remaining.index(item)
            remaining.pop(digit)
            index += digit * math.factorial(self.n - 1 - at)
        return index

    def neighbour(self, value: Any, rng: np.random.Generator) -> tuple[int, ...]:
        if self.n == 1:
            return tuple(value)
        order = list(value)
        at = int(rng.integers(self.n - 1))
        order[at], order[at + 1] = order[at + 1], order[at]
        return tuple(order)


@dataclass(frozen=True)
class Subset(Parameter):
    """A subset of `k` of the `items`, in their order."""

    kind = "subset"
    items: tuple[Any, ...]
    k: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "items", tuple(self.items))
        object.__setattr__(self, "units", max(len(self.items), 1))
        if not 0 <= self.k <= len(self.items):
            raise InvalidArgumentError("Subset", f"k={self.k} is not in 0 to {len(self.items)}")

    @property
    def size(self) -> int:
        return math.comb(len(self.items), self.k)

    def from_units(self, u: Seq[float]) -> tuple[Any, ...]:
        lowest = sorted(range(len(self.items)), key=u.__getitem__)[: self.k]
        return tuple(self.items[at] for at in sorted(lowest))

    def to_units(self, value: Any) -> list[float]:
        return [0.25 if item in value else 0.75 for item in self.items]

    def checked(self, value: Any) -> tuple[Any, ...]:
        chosen = tuple(item for item in self.items if item in value)
        if len(chosen) != self.k or len(tuple(value)) != self.k:
            raise ValueError(f"{value!r} is not {self.k} of {list(self.items)}")
        return chosen

    def from_index(self, index: int) -> tuple[Any, ...]:
        # The combinatorial number system, from the largest item down.
        chosen, remaining = [], self.k
        for at in range(len(self.items) - 1, -1, -1):
            below = math.comb(at, remaining)
            if remaining and index >= below:
                index -= below
                remaining -= 1
                chosen.append(at)
        return tuple(self.items[at] for at in sorted(chosen))

    def to_index(self, value: Any) -> int:
        at = [number for number, item in enumerate(self.items) if item in value]
        return sum(math.comb(item, rank + 1) for rank, item in enumerate(at))

    def neighbour(self, value: Any, rng: np.random.Generator) -> tuple[Any, ...]:
        others = [item for item in self.items if item not in value]
        if not others or not self.k:
            return tuple(value)
        chosen = list(value)
        chosen[int(rng.integers(self.k))] = others[int(rng.integers(len(others)))]
        return self.checked(chosen)


@dataclass(frozen=True)
class Sequence(Parameter):
    """A sequence of `min_len` to `max_len` symbols of `alphabet`, such as a schedule."""

    kind = "sequence"
    alphabet: tuple[Any, ...]
    min_len: int
    max_len: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "alphabet", tuple(self.alphabet))
        object.__setattr__(self, "units", self.max_len + 1)
        if not self.alphabet or not 0 <= self.min_len <= self.max_len:
            raise InvalidArgumentError(
                "Sequence",
                f"cannot have {self.min_len} to {self.max_len} of {len(self.alphabet)} symbols",
            )

    @property
    def size(self) -> int:
        symbols = len(self.alphabet)
        return sum(symbols**length for length in range(self.min_len, self.max_len + 1))

    def from_units(self, u: Seq[float]) -> tuple[Any, ...]:
        length = self.min_len + int(u[0] * (self.max_len - self.min_len + 1))
        symbols = len(self.alphabet)
        return tuple(self.alphabet[int(x * symbols)] for x in u[1 : length + 1])

    def to_units(self, value: Any) -> list[float]:
        lengths = self.max_len - self.min_len + 1
        u = [(len(value) - self.min_len + 0.5) / lengths]
        u += [(self.alphabet.index(symbol) + 0.5) / len(self.alphabet) for symbol in value]
        return u + [0.5] * (self.units - len(u))

    def checked(self, value: Any) -> tuple[Any, ...]:
        word = tuple(value)
        if not self.min_len <= len(word) <= self.max_len or any(
            symbol not in self.alphabet for symbol in word
        ):
            raise ValueError(
                f"{word} is not {self.min_len} to {self.max_len} symbols of {list(self.alphabet)}"
            )
        return word

    def from_index(self, index: int) -> tuple[Any, ...]:
        symbols, length = len(self.alphabet), self.min_len
        while index >= symbols**length:
            index -= symbols**length
            length += 1
        word = []
        for _ in range(length):
            index, digit = divmod(index, symbols)
            word.append(self.alphabet[digit])
        return tuple(reversed(word))

    def to_index(self, value: Any) -> int:
        symbols, number = len(self.alphabet), 0
        for symbol in value:
            number = number * symbols + self.alphabet.index(symbol)
        return int(number + sum(symbols**length for length in range(self.min_len, len(value))))


_KINDS: Mapping[str, type[Parameter]] = {
    kind.kind: kind for kind in (Float, Int, Categorical, Bool, Permutation, Subset, Sequence)
}


def parameter_from_json(data: Mapping[str, Any]) -> Parameter:
    """Create a parameter from the result of `Parameter.to_json`.

    Raises:
        InvalidArgumentError: the kind or a setting is unknown.
    """
    settings = dict(data)
    kind = settings.pop("kind", None)
    if kind not in _KINDS:
        raise InvalidArgumentError(
            "space",
            f"'{kind}' is not a kind of parameter",
            remedy=f"one of {', '.join(sorted(_KINDS))}",
        )
    try:
        return _KINDS[kind](**settings)
    except TypeError as error:
        raise InvalidArgumentError("space", f"a parameter of kind {kind}: {error}") from None
