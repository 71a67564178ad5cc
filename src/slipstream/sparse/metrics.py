"""Every distance as a sum over the columns that two rows share, and a final function of it.

With ``u(a) = f(a, 0)`` and ``v(b) = f(0, b)``, a sum of ``f`` over the columns of either row is

    sum over A of u + sum over B of v + sum over both of (f(a, b) - u(a) - v(b)),

two numbers per row, computed once, and one pass over the columns in both. Published kernels for
such distances take two passes (Nolet et al., Semiring Primitives for Sparse Neighborhood Methods on
the GPU, MLSys 2022). A `MetricPlan` has the terms of the sum (`Op`), the function from sums to
distance (`Finish`) and the formula for a distance whose terms nearly cancelled (`Exact`). Only the
maximum of ``chebyshev`` does not have this form; see `slipstream.sparse.chebyshev`.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from slipstream.errors import InvalidArgumentError, UnknownNameError
from slipstream.sparse.matrix import Float64s, Floats, Rows


class Op(enum.IntEnum):
    """Term of the sum over shared columns; the numbers are those of ``sparse.h``."""

    DOT = 0
    MIN = 1
    COMMON = 2
    SHARE = 3
    EQUAL = 4
    POWER = 5
    ENTROPY = 6
    SHARE_MIN = 7


class Finish(enum.IntEnum):
    """Function from sums ``s`` and ``t`` and row terms ``u`` and ``v`` to a distance."""

    AFFINE = 0
    SUM = 1
    COSINE = 2
    RATIO = 3
    CORRELATION = 4
    DIVERGENCE = 5


class Root(enum.IntEnum):
    """Root of a `Finish.SUM`."""

    PLAIN = 0
    SQRT = 1
    POWER_ROOT = 2


class Exact(enum.IntEnum):
    """Formula by which two rows are compared again if the sums nearly cancelled."""

    NEVER = 0
    ABSOLUTE = 1
    SQUARED = 2
    POWERS = 3
    SHARES = 4
    ENTROPIES = 5
    RELATIVE = 6
    CENTRED = 7
    OVER_MAXIMA = 8
    OVER_SUMS = 9


@dataclass(frozen=True, eq=False)
class Side:
    """One matrix as input of a plan.

    Attributes:
        channels: for each channel the values to multiply, float [nnz].
        aux: for each channel a function of those values that the operation also needs, or None.
        exact: values from which distances are recomputed, float [nnz].
        term: float64 [rows], ``u`` or ``v``.
        term1, term2: float64 [rows]; additional terms of a divergence or correlation.
    """

    channels: tuple[Floats, ...]
    exact: Floats
    term: Float64s
    aux: tuple[Floats | None, ...] = (None, None)
    term1: Float64s | None = None
    term2: Float64s | None = None

    def as_type(self, dtype: npt.DTypeLike) -> Side:
        """Return the side with values of `dtype`."""
        return replace(
            self,
            channels=tuple(np.ascontiguousarray(values, dtype) for values in self.channels),
            exact=np.ascontiguousarray(self.exact, dtype),
            aux=tuple(
                None if values is None else np.ascontiguousarray(values, dtype)
                for values in self.aux
            ),
        )


Prepare = Callable[[Rows], Side]


@dataclass(frozen=True, eq=False)
class MetricPlan:
    """Computation of one metric.

    Attributes:
        ops: for each channel the terms that are summed; the sums are ``s`` and ``t`` (one channel:
            both).
        left, right: make a `Side` of A and of B.
        degree: power of the values; if a type cannot hold it, a wider one is used.
        c0, c1, c2, c3: constants of `finish` and `exact`; see ``sparse.h``.
        power: ``p``.
        columns: ``k``, of the input matrix.
    """

    ops: tuple[Op, ...]
    finish: Finish
    left: Prepare
    right: Prepare
    root: Root = Root.PLAIN
    exact: Exact = Exact.NEVER
    degree: float = 0.0
    c0: float = 1.0
    c1: float = 0.0
    c2: float = 0.0
    c3: float = 0.0
    power: float = 0.0
    columns: int = 0
    name: str = ""


@dataclass(frozen=True)
class Options:
    """Arguments of some metrics.

    Attributes:
        p: exponent of ``minkowski``.
        normalise: whether to divide each row by its sum: for ``hellinger`` and ``jensenshannon``
            unless it is False, for ``kl`` and ``kl_intersection`` only if True. An empty row
            remains empty.
        smoothing: ``kl``: added to every value of both rows, so that the distance is finite, and
            still 0 from a row to itself; it is never negative for normalised rows with entries.
    """

    p: float = 2.0
    normalise: bool | None = None
    smoothing: float = 0.0


ALIASES = {
    "cityblock": "manhattan", "l1": "manhattan", "taxicab": "manhattan",
    "l2": "euclidean", "linf": "chebyshev", "infinity": "chebyshev",
    "inner": "inner_product", "dot": "inner_product", "ip": "inner_product",
    "weighted_jaccard": "ruzicka", "jensen_shannon": "jensenshannon", "js": "jensenshannon",
    "kl_divergence": "kl", "bray_curtis": "braycurtis", "russell_rao": "russellrao",
    "sorensen": "dice",
}  # fmt: skip
NON_NEGATIVE = frozenset({"hellinger", "jensenshannon", "kl", "kl_intersection", "ruzicka"})
_TAKES: dict[str, frozenset[str]] = {
    "minkowski": frozenset({"p"}),
    "hellinger": frozenset({"normalise"}),
    "jensenshannon": frozenset({"normalise"}),
    "kl": frozenset({"normalise", "smoothing"}),
    "kl_intersection": frozenset({"normalise"}),
}


def metric_name(metric: str) -> str:
    """Return the canonical name of `metric`, which may be an alias.

    Raises:
        InvalidArgumentError: there is no such metric; the nearest are suggested.
    """
    if not isinstance(metric, str):
        raise InvalidArgumentError(
            "metric", f"{type(metric).__name__} is not a name", remedy="pass a string or a Semiring"
        )
    name = ALIASES.get(metric.lower(), metric.lower())
    if name not in METRICS:
        near = UnknownNameError("metric", metric, [*METRICS, *ALIASES])
        raise InvalidArgumentError("metric", near.what, remedy=near.remedy)
    return name


def check_options(name: str, arguments: dict[str, Any]) -> Options:
    """Return the keyword arguments of a metric as `Options`.

    Raises:
        InvalidArgumentError: the metric has no such argument, or the value is out of range.
    """
    takes = _TAKES.get(name, frozenset())
    for key in arguments:
        if key not in takes:
            accepted = f"it takes {', '.join(sorted(takes))}" if takes else "it takes none"
            raise InvalidArgumentError(key, f"not an argument of {name}", remedy=accepted)
    options = Options(**arguments)
    if not (_is_number(options.p) and 0 < options.p < np.inf):
        raise InvalidArgumentError(
            "p",
            f"{options.p!r} is not a positive number",
            remedy="for p = inf use metric='chebyshev'",
        )
    if not (_is_number(options.smoothing) and 0 <= options.smoothing < np.inf):
        raise InvalidArgumentError("smoothing", f"{options.smoothing!r} is not zero or positive")
    if not isinstance(options.normalise, bool | np.bool_ | None):
        raise InvalidArgumentError("normalise", f"{options.normalise!r} is not True or False")
    normalise = None if options.normalise is None else bool(options.normalise)
    return Options(float(options.p), normalise, float(options.smoothing))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float | np.number) and not isinstance(value, bool)


def check_domain(name: str, rows: Rows, argument: str) -> None:
    """Raise InvalidArgumentError for negative values if `name` is not defined for them."""
    if name in NON_NEGATIVE and rows.nnz and rows.data.min() < 0:
        at = int(rows.data.argmin())
        row = int(np.searchsorted(rows.indptr, at, side="right")) - 1
        raise InvalidArgumentError(
            argument,
            f"{name} needs values >= 0, but row {row} has {rows.data[at]:g}",
            remedy="use braycurtis or canberra for negative values",
        )


def plan_of(name: str, options: Options, columns: int, non_negative: bool) -> MetricPlan:
    """Return the plan of an additive metric.

    Args:
        name: one of `ADDITIVE`.
        columns: those of the input matrices.
        non_negative: whether no value of either matrix is below zero; some sums are then cheaper.
    """
    if name == "minkowski":
        special = {1.0: "manhattan", 2.0: "euclidean"}.get(float(options.p))
        if special is not None:
            return plan_of(special, options, columns, non_negative)
    common = Op.MIN if non_negative else Op.COMMON
    return replace(_PLANS[name](options, columns, common), columns=columns, name=name)


# ---- sides ---------------------------------------------------------------------------------------


def _plain(term: Callable[[Rows], Float64s]) -> Prepare:
    return lambda rows: Side((rows.data,), rows.data, term(rows))


def _counts(rows: Rows) -> Float64s:
    return rows.lengths.astype(np.float64)


def _zero(rows: Rows) -> Float64s:
    return np.zeros(len(rows))


def _sum_of_sizes(rows: Rows) -> Float64s:
    return rows.sums(np.abs(rows.data, dtype=np.float64))


def _sum_of_squares(rows: Rows) -> Float64s:
    return rows.sums(np.square(rows.data, dtype=np.float64))


def _binary(rows: Rows) -> Side:
    return Side((np.ones_like(rows.data),), rows.data, _counts(rows))


def _unit_length(rows: Rows) -> Side:
    """Return rows of length 1, first scaled by the largest entry so that no square overflows."""
    values = rows.data.astype(np.float64)
    largest = _largest(rows)
    # A power of two divides without rounding.
    values = values / rows.repeat(_power_of_two(largest))
    values = values / rows.repeat(_or_one(np.sqrt(rows.sums(np.square(values)))))
    return Side((values,), values, (largest > 0).astype(np.float64))


def _centred(rows: Rows, *, left: bool) -> Side:
    """Return rows divided by their deviation from their mean over all columns."""
    count, values = float(max(rows.columns, 1)), rows.data.astype(np.float64)
    largest = _largest(rows)
    values = values / rows.repeat(_power_of_two(largest))
    mean = rows.sums(values) / count
    deviation = rows.sums(np.square(values - rows.repeat(mean)))
    deviation += (count - rows.lengths) * np.square(mean)
    constant = largest == 0
    full = (rows.lengths == rows.columns) & (rows.lengths > 0)
    if full.any():
        starts = rows.indptr[:-1][rows.lengths > 0]
        spread = np.zeros(len(rows))
        spread[rows.lengths > 0] = np.maximum.reduceat(values, starts) - np.minimum.reduceat(
            values, starts
        )
        constant |= full & (spread == 0)
    scale = np.where(constant, np.nan, np.sqrt(deviation))
    # Values of a row without variance must be numbers; its term makes distances undefined.
    values = values / rows.repeat(np.where(constant, 1.0, scale))
    mean = mean / scale
    return Side((values,), values, mean * count if left else mean, term1=mean)


def _largest(rows: Rows) -> Float64s:
    largest = np.zeros(len(rows))
    occupied = rows.lengths > 0
    if occupied.any():
        sizes = np.abs(rows.data, dtype=np.float64)
        largest[occupied] = np.maximum.reduceat(sizes, rows.indptr[:-1][occupied])
    return largest


def _power_of_two(size: Float64s) -> Float64s:
    return np.ldexp(1.0, np.frexp(_or_one(size))[1])


def _or_one(divisor: Float64s) -> Float64s:
    return np.where(divisor > 0, divisor, 1.0)


def _shares(rows: Rows, normalise: bool) -> Float64s:
    """Return values as float64, each row divided by its sum if `normalise`."""
    values = rows.data.astype(np.float64)
    return values / rows.repeat(_or_one(rows.sums(values))) if normalise else values


def _square_roots(rows: Rows, normalise: bool) -> Side:
    shares = _shares(rows, normalise)
    values = np.sqrt(shares)
    return Side((values,), values, rows.sums(np.square(values)))


def _entropies(rows: Rows, normalise: bool) -> Side:
    values = _shares(rows, normalise)
    return Side(
        (values,), values, rows.sums(values) * np.log(2.0), aux=(values * np.log(values), None)
    )


def _powers(rows: Rows, p: float) -> Side:
    powers = np.power(np.abs(rows.data, dtype=np.float64), p)
    return Side((rows.data,), rows.data, rows.sums(powers), aux=(powers, None))


# ---- the table -----------------------------------------------------------------------------------

_Make = Callable[[Options, int, Op], MetricPlan]


def _both(ops: tuple[Op, ...], finish: Finish, side: Prepare, **options: Any) -> MetricPlan:
    return MetricPlan(ops, finish, side, side, **options)


def _normalised(options: Options) -> bool:
    return options.normalise is not False


def _braycurtis(options: Options, columns: int, common: Op) -> MetricPlan:
    constants: dict[str, Any] = {"exact": Exact.OVER_SUMS, "degree": 1.0, "c1": -2.0}
    side = _plain(_sum_of_sizes)
    if common is Op.MIN:
        return _both((common,), Finish.RATIO, side, **constants)

    # |a + b| is less than |a| + |b| if the signs differ: the common part of -a and b.
    def left(rows: Rows) -> Side:
        return Side((rows.data, -rows.data), rows.data, _sum_of_sizes(rows))

    def right(rows: Rows) -> Side:
        return Side((rows.data, rows.data), rows.data, _sum_of_sizes(rows))

    return MetricPlan((common, common), Finish.RATIO, left, right, c2=-2.0, **constants)


def _kl(options: Options, columns: int, common: Op) -> MetricPlan:
    normalise, smoothing = options.normalise is True, options.smoothing

    def left(rows: Rows) -> Side:
        values = _shares(rows, normalise)
        # With smoothing, a column that neither row has adds nothing.
        logs = (
            (values + smoothing) * np.log1p(values / smoothing)
            if smoothing
            else values * np.log(values)
        )
        channels = (values,) if smoothing else (values, np.ones_like(values))
        # Number of entries that B must share for a finite distance; with smoothing, none.
        needed = np.full(len(rows), -np.inf) if smoothing else _counts(rows)
        return Side(channels, values, rows.sums(logs), term1=rows.sums(np.abs(logs)), term2=needed)

    def right(rows: Rows) -> Side:
        values = _shares(rows, normalise)
        if smoothing:
            logs = np.log1p(values / smoothing)
            return Side((logs,), values, -smoothing * rows.sums(logs))
        return Side((np.log(values), np.ones_like(values)), values, _zero(rows))

    ops = (Op.DOT,) if smoothing else (Op.DOT, Op.DOT)
    constants: dict[str, Any] = {"exact": Exact.RELATIVE, "degree": 1.0, "c3": smoothing}
    return MetricPlan(ops, Finish.DIVERGENCE, left, right, **constants)


def _kl_intersection(options: Options, columns: int, common: Op) -> MetricPlan:
    def left(rows: Rows) -> Side:
        values = _shares(rows, options.normalise is True)
        return Side((values * np.log(values), values), values, _zero(rows))

    def right(rows: Rows) -> Side:
        values = _shares(rows, options.normalise is True)
        return Side((np.ones_like(values), np.log(values)), values, _zero(rows))

    return MetricPlan((Op.DOT, Op.DOT), Finish.AFFINE, left, right, c0=0.0, c1=0.5, c2=-0.5)


_PLANS: dict[str, _Make] = {
    "inner_product": lambda o, k, m: _both(
        (Op.DOT,), Finish.AFFINE, _plain(_zero), c0=0.0, c1=1.0, degree=2.0
    ),
    "cosine": lambda o, k, m: _both(
        (Op.DOT,), Finish.COSINE, _unit_length, exact=Exact.SQUARED, c3=0.5
    ),
    "correlation": lambda o, k, m: MetricPlan(
        (Op.DOT,), Finish.CORRELATION, partial(_centred, left=True), partial(_centred, left=False),
        exact=Exact.CENTRED,
    ),
    "sqeuclidean": lambda o, k, m: _both(
        (Op.DOT,), Finish.SUM, _plain(_sum_of_squares),
        exact=Exact.SQUARED, degree=2.0, c1=-2.0, c3=1.0,
    ),
    "euclidean": lambda o, k, m: replace(_PLANS["sqeuclidean"](o, k, m), root=Root.SQRT),
    "jaccard": lambda o, k, m: _both((Op.DOT,), Finish.RATIO, _binary, c1=-2.0, c2=-1.0),
    "dice": lambda o, k, m: _both((Op.DOT,), Finish.RATIO, _binary, c1=-2.0),
    "russellrao": lambda o, k, m: _both(
        (Op.DOT,), Finish.AFFINE, _binary, c0=1.0, c1=-1.0 / max(k, 1)
    ),
    "ruzicka": lambda o, k, m: _both(
        (Op.MIN,), Finish.RATIO, _plain(_sum_of_sizes),
        exact=Exact.OVER_MAXIMA, degree=1.0, c1=-2.0, c2=-1.0,
    ),
    "hellinger": lambda o, k, m: _both(
        (Op.DOT,), Finish.SUM, partial(_square_roots, normalise=_normalised(o)),
        root=Root.SQRT, exact=Exact.SQUARED, degree=2.0, c0=0.5, c1=-2.0, c3=1.0,
    ),
    "manhattan": lambda o, k, m: _both(
        (m,), Finish.SUM, _plain(_sum_of_sizes), exact=Exact.ABSOLUTE, degree=1.0, c1=-2.0
    ),
    "minkowski": lambda o, k, m: _both(
        (Op.POWER,), Finish.SUM, partial(_powers, p=o.p),
        root=Root.POWER_ROOT, exact=Exact.POWERS, degree=o.p, c1=1.0, power=o.p,
    ),
    "canberra": lambda o, k, m: _both(
        (Op.SHARE_MIN if m is Op.MIN else Op.SHARE,), Finish.SUM, _plain(_counts),
        exact=Exact.SHARES, degree=1.0, c1=1.0,
    ),
    "hamming": lambda o, k, m: _both(
        (Op.EQUAL,), Finish.SUM, _plain(_counts), c0=1.0 / max(k, 1), c1=1.0
    ),
    "jensenshannon": lambda o, k, m: _both(
        (Op.ENTROPY,), Finish.SUM, partial(_entropies, normalise=_normalised(o)),
        root=Root.SQRT, exact=Exact.ENTROPIES, degree=1.0, c0=0.5, c1=1.0,
    ),
    "braycurtis": _braycurtis,
    "kl": _kl,
    "kl_intersection": _kl_intersection,
}  # fmt: skip
ADDITIVE = tuple(sorted(_PLANS))
METRICS = tuple(sorted((*ADDITIVE, "chebyshev")))
