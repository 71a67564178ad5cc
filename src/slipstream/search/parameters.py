"""What can be varied: numbers, choices, orders, subsets, sequences.

Every parameter maps numbers of the unit interval onto its values (so that random, quasi-random and
mutated candidates are all made in one way), and, where there are finitely many, values onto
0, 1, 2, ...
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
    """One thing that is varied."""

    kind: ClassVar[str]
    units: int = 1
    """How many numbers of the unit interval make a value."""

    @property
    @abstractmethod
    def size(self) -> int | None:
        """How many values there are; None for a continuum."""

    @abstractmethod
    def from_units(self, u: Seq[float]) -> Any:
        """The value for `units` numbers in [0, 1)."""

    @abstractmethod
    def to_units(self, value: Any) -> list[float]:
        """Numbers that `from_units` maps onto `value`."""

    @abstractmethod
    def checked(self, value: Any) -> Any:
        """`value` in its one canonical form.

        Raises:
            ValueError: it is no value of this parameter.
        """

    @abstractmethod
    def from_index(self, index: int) -> Any:
        """The value number `index` of `size`."""

    @abstractmethod
    def to_index(self, value: Any) -> int:
        """The number of `value`."""

    def neighbour(self, value: Any, rng: np.random.Generator) -> Any:
        """A value near `value`, another one where there is one: a unit number is moved."""
        u = self.to_units(value)
        at = int(rng.integers(len(u)))
        for _ in range(16):
            u[at] = _reflected(u[at] + float(rng.normal(0.0, 0.2)))
            if (near := self.from_units(u)) != value:
                return near
        return value

    def column(self, u: NDArray[np.float64]) -> NDArray[Any]:
        """Values for rows of unit numbers [n, units], as an array [n]: numbers or objects."""
        values = np.empty(len(u), dtype=object)
        values[:] = [self.from_units(row) for row in u.tolist()]
        return values

    def unit_column(self, column: NDArray[Any]) -> NDArray[np.float64]:
        """Values [n] as numbers of the unit cube [n, units]."""
        return np.array([self.to_units(value) for value in column], dtype=np.float64)

    def to_json(self) -> dict[str, Any]:
        """Its kind and settings, those at their defaults left out."""
        given = {f.name: getattr(self, f.name) for f in fields(self)}  # type: ignore[arg-type]
        default = {f.name: f.default for f in fields(self)}  # type: ignore[arg-type]
        kept = {k: v for k, v in given.items() if v is not default[k] and v != default[k]}
        return {"kind": self.kind, **kept}


def _reflected(u: float) -> float:
    """A number that left the unit interval, reflected at its ends."""
    u = abs(u) % 2.0
    return min(2.0 - u if u > 1.0 else u, _BELOW_ONE)


def _bounds(kind: str, lo: float, hi: float, log: bool) -> None:
    if not (math.isfinite(lo) and math.isfinite(hi)):
        raise InvalidArgumentError(kind, f"bounds {lo} and {hi} are not finite")
    if lo > hi:
        raise InvalidArgumentError(kind, f"the range from {lo} to {hi} is empty")
    if log and lo <= 0:
        raise InvalidArgumentError(kind, f"a logarithmic range cannot begin at {lo}")


@dataclass(frozen=True)
class Float(Parameter):
    """A real number in [lo, hi], even in its logarithm where `log`.

    Args:
        step: only lo, lo + step, ..., at most hi; not together with `log`.
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
            raise InvalidArgumentError("Float", f"a step of {self.step} is not above 0")
        if self._count > 2**53:
            raise InvalidArgumentError("Float", f"a step of {self.step} is lost in {self.hi}")
        if self.log:
            raise InvalidArgumentError(
                "Float", "a logarithmic range has no step", remedy="either log=True or step="
            )

    @property
    def size(self) -> int | None:
        if self.step is None:
            return 1 if self.lo == self.hi else None
        return self._count

    @cached_property
    def _count(self) -> int:
        # In decimals, in which 0.1 to 0.3 are two steps of 0.1.
        low, high, step = (Decimal(repr(value)) for value in (self.lo, self.hi, self.step))
        return int((high - low) / step) + 1

    def from_units(self, u: Seq[float]) -> float:
        if self.step is not None:
            return self.from_index(int(u[0] * self._count))
        if self.log:
            value = self.lo * (self.hi / self.lo) ** u[0]
        else:
            value = self.lo + u[0] * (self.hi - self.lo)
        # Rounding may leave the range; -0.0 and 0.0 would be two candidates.
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
            raise ValueError(f"{value!r} is no number")
        number = float(value)
        if not self.lo <= number <= self.hi:
            raise ValueError(f"{number} is outside {self.lo} to {self.hi}")
        if self.step is None:
            return number + 0.0
        stepped = self.from_index(min(self.to_index(number), self._count - 1))
        if not math.isclose(number, stepped, rel_tol=1e-9, abs_tol=1e-9 * self.step):
            raise ValueError(f"{number} is not {self.lo} plus steps of {self.step}")
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
    """A parameter whose values are numbered, with the unit interval cut into equal parts."""

    @property
    @abstractmethod
    def count(self) -> int:
        """How many values."""

    @property
    def size(self) -> int:
        return self.count

    def from_units(self, u: Seq[float]) -> Any:
        return self.from_index(int(u[0] * self.count))

    def to_units(self, value: Any) -> list[float]:
        return [(self.to_index(value) + 0.5) / self.count]


@dataclass(frozen=True)
class Int(_Finite):
    """A integer lo, lo + step, ..., at most hi; even in its logarithm where `log`."""

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
                raise InvalidArgumentError("Int", f"{name}={value!r} is no integer")
        if self.step < 1:
            raise InvalidArgumentError("Int", f"a step of {self.step} leads nowhere")

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
            raise ValueError(f"{value!r} is no integer")
        number = int(value)
        if not self.lo <= number <= self.hi or (number - self.lo) % self.step:
            by = f" in steps of {self.step}" if self.step > 1 else ""
            raise ValueError(f"{number} is not among {self.lo} to {self.hi}{by}")
        return number

    def from_index(self, index: int) -> int:
        return self.lo + self.step * index

    def to_index(self, value: Any) -> int:
        return int((value - self.lo) // self.step)

    def neighbour(self, value: Any, rng: np.random.Generator) -> int:
        at, most = self.to_index(value), self.count - 1
        # Mostly the next one, sometimes further.
        jump = int(rng.geometric(0.5)) * (1 if rng.random() < 0.5 else -1)
        to = min(max(at + jump, 0), most)
        return self.from_index(to if to != at else min(max(at - jump, 0), most))

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
    """One of `choices`: strings, numbers, booleans, None, or lists of them.

    Args:
        ordered: neighbours in the list are near each other.
    """

    kind = "categorical"
    choices: tuple[Any, ...]
    ordered: bool = False

    def __post_init__(self) -> None:
        choices = tuple(tuple(c) if isinstance(c, list) else c for c in self.choices)
        object.__setattr__(self, "choices", choices)
        if not choices:
            raise InvalidArgumentError("Categorical", "there is nothing to choose from")
        try:
            written = {json.dumps(choice): at for at, choice in enumerate(choices)}
        except TypeError as error:
            raise InvalidArgumentError(
                "Categorical", f"a choice cannot be written as JSON: {error}",
                remedy="choose among names, and look them up in your function",
            ) from None  # fmt: skip
        if len(written) < len(choices):
            raise InvalidArgumentError("Categorical", f"{list(choices)} repeats a choice")
        plain = len(set(choices)) == len(choices)
        object.__setattr__(self, "_written", written)
        object.__setattr__(self, "_known", dict(zip(choices, range(len(choices)), strict=True))
                           if plain else None)  # fmt: skip

    @property
    def count(self) -> int:
        return len(self.choices)

    def checked(self, value: Any) -> Any:
        at = self._at(value)
        if at is None:
            raise ValueError(f"{value!r} is none of {list(self.choices)}")
        return self.choices[at]

    def from_index(self, index: int) -> Any:
        return self.choices[index]

    def to_index(self, value: Any) -> int:
        at = self._at(value)
        if at is None:
            raise ValueError(f"{value!r} is none of {list(self.choices)}")
        return at

    def _at(self, value: Any) -> int | None:
        # 1, 1.0 and True are equal to Python and three choices to a user; JSON tells them apart.
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
        if column.dtype == object or self._known is None:  # type: ignore[attr-defined]
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
    """An order of 0 .. n - 1."""

    kind = "permutation"
    n: int

    def __post_init__(self) -> None:
        if self.n < 1:
            raise InvalidArgumentError("Permutation", f"an order of {self.n} things")
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
            raise ValueError(f"{order} is no order of 0 to {self.n - 1}")
        return tuple(int(item) for item in order)

    def from_index(self, index: int) -> tuple[int, ...]:
        left, order = list(range(self.n)), []
        for at in range(self.n - 1, -1, -1):
            digit, index = divmod(index, math.factorial(at))
            order.append(left.pop(digit))
        return tuple(order)

    def to_index(self, value: Any) -> int:
        left, index = list(range(self.n)), 0
        for at, item in enumerate(value):
            digit = left.index(item)
            left.pop(digit)
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
    """`k` of `items`, in their order."""

    kind = "subset"
    items: tuple[Any, ...]
    k: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "items", tuple(self.items))
        object.__setattr__(self, "units", max(len(self.items), 1))
        if not 0 <= self.k <= len(self.items):
            raise InvalidArgumentError("Subset", f"{self.k} of {len(self.items)} items")

    @property
    def size(self) -> int:
        return math.comb(len(self.items), self.k)

    def from_units(self, u: Seq[float]) -> tuple[Any, ...]:
        lowest = sorted(range(len(self.items)), key=u.__getitem__)[: self.k]
        return tuple(self.items[at] for at in sorted(lowest))

    def to_units(self, value: Any) -> list[float]:
        return [0.25 if item in value else 0.75 for item in self.items]

    def checked(self, value: Any) -> tuple[Any, ...]:
        kept = tuple(item for item in self.items if item in value)
        if len(kept) != self.k or len(tuple(value)) != self.k:
            raise ValueError(f"{value!r} is not {self.k} of {list(self.items)}")
        return kept

    def from_index(self, index: int) -> tuple[Any, ...]:
        # The combinatorial number system, from the largest item down.
        kept, left = [], self.k
        for at in range(len(self.items) - 1, -1, -1):
            below = math.comb(at, left)
            if left and index >= below:
                index -= below
                left -= 1
                kept.append(at)
        return tuple(self.items[at] for at in sorted(kept))

    def to_index(self, value: Any) -> int:
        at = [number for number, item in enumerate(self.items) if item in value]
        return sum(math.comb(item, rank + 1) for rank, item in enumerate(at))

    def neighbour(self, value: Any, rng: np.random.Generator) -> tuple[Any, ...]:
        out = [item for item in self.items if item not in value]
        if not out or not self.k:
            return tuple(value)
        kept = list(value)
        kept[int(rng.integers(self.k))] = out[int(rng.integers(len(out)))]
        return self.checked(kept)


@dataclass(frozen=True)
class Sequence(Parameter):
    """A word of `min_len` to `max_len` letters of `alphabet`: a program, a schedule."""

    kind = "sequence"
    alphabet: tuple[Any, ...]
    min_len: int
    max_len: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "alphabet", tuple(self.alphabet))
        object.__setattr__(self, "units", self.max_len + 1)
        if not self.alphabet or not 0 <= self.min_len <= self.max_len:
            raise InvalidArgumentError(
                "Sequence", f"{self.min_len} to {self.max_len} of {len(self.alphabet)} letters"
            )

    @property
    def size(self) -> int:
        letters = len(self.alphabet)
        return sum(letters**length for length in range(self.min_len, self.max_len + 1))

    def from_units(self, u: Seq[float]) -> tuple[Any, ...]:
        length = self.min_len + int(u[0] * (self.max_len - self.min_len + 1))
        letters = len(self.alphabet)
        return tuple(self.alphabet[int(one * letters)] for one in u[1 : length + 1])

    def to_units(self, value: Any) -> list[float]:
        lengths = self.max_len - self.min_len + 1
        u = [(len(value) - self.min_len + 0.5) / lengths]
        u += [(self.alphabet.index(one) + 0.5) / len(self.alphabet) for one in value]
        return u + [0.5] * (self.units - len(u))

    def checked(self, value: Any) -> tuple[Any, ...]:
        word = tuple(value)
        if not self.min_len <= len(word) <= self.max_len or any(
            one not in self.alphabet for one in word
        ):
            raise ValueError(f"{word} is no word of {list(self.alphabet)} of that length")
        return word

    def from_index(self, index: int) -> tuple[Any, ...]:
        letters, length = len(self.alphabet), self.min_len
        while index >= letters**length:
            index -= letters**length
            length += 1
        word = []
        for _ in range(length):
            index, digit = divmod(index, letters)
            word.append(self.alphabet[digit])
        return tuple(reversed(word))

    def to_index(self, value: Any) -> int:
        letters, number = len(self.alphabet), 0
        for one in value:
            number = number * letters + self.alphabet.index(one)
        return int(number + sum(letters**one for one in range(self.min_len, len(value))))


_KINDS: Mapping[str, type[Parameter]] = {
    kind.kind: kind for kind in (Float, Int, Categorical, Bool, Permutation, Subset, Sequence)
}


def parameter_from_json(data: Mapping[str, Any]) -> Parameter:
    """The parameter that `Parameter.to_json` wrote.

    Raises:
        InvalidArgumentError: an unknown kind or setting.
    """
    settings = dict(data)
    kind = settings.pop("kind", None)
    if kind not in _KINDS:
        raise InvalidArgumentError(
            "space", f"no kind of parameter '{kind}'", remedy=f"one of {', '.join(sorted(_KINDS))}"
        )
    try:
        return _KINDS[kind](**settings)
    except TypeError as error:
        raise InvalidArgumentError("space", f"a parameter of kind {kind}: {error}") from None
