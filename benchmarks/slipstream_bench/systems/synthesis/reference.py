"""The list language, written from its definition: an independent reference in plain Python."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Value = int | list[int]

_TESTS: tuple[Callable[[int], bool], ...] = (
    lambda x: x > 0, lambda x: x < 0, lambda x: x % 2 == 1, lambda x: x % 2 == 0,
)  # fmt: skip
_PAIRS: tuple[Callable[[int, int], int], ...] = (
    lambda a, b: a + b, lambda a, b: a - b, lambda a, b: a * b, min, max,
)  # fmt: skip


def _toward_zero(x: int, by: int) -> int:
    return x // by if x >= 0 else -(-x // by)


_MAPS: tuple[Callable[[int], int], ...] = (
    lambda x: x + 1, lambda x: x - 1, lambda x: x * 2, lambda x: x * 3, lambda x: x * 4,
    lambda x: _toward_zero(x, 2), lambda x: _toward_zero(x, 3), lambda x: _toward_zero(x, 4),
    lambda x: -x, lambda x: x * x,
)  # fmt: skip


def reference(program: Sequence[int], inputs: Sequence[Value]) -> Value | None:
    """Return the result of a program; None if a value leaves the range."""
    numbers = [0] + [value for value in inputs if isinstance(value, int)]
    lists: list[list[int]] = [[], []] + [value for value in inputs if isinstance(value, list)]
    result: Value = 0
    for function in program:
        result = _applied(function, numbers[-1], lists[-1], lists[-2])
        values = result if isinstance(result, list) else [result]
        if len(values) > 20 or any(value < -256 or value > 255 for value in values):
            return None
        if isinstance(result, list):
            lists.append(result)
        else:
            numbers.append(result)
    return result


def _applied(f: int, n: int, xs: list[int], before: list[int]) -> Value:
    if f <= 4:
        return (xs[0], xs[-1], min(xs), max(xs), sum(xs))[f] if xs else 0
    if f <= 8:
        return len([x for x in xs if _TESTS[f - 5](x)])
    if f == 9:
        return xs[n] if n in range(len(xs)) else 0
    if f == 10:
        return [*xs, n].index(n) if n in xs else -1
    if f <= 12:
        return list(reversed(xs)) if f == 11 else sorted(xs)
    if f <= 22:
        return [_MAPS[f - 13](x) for x in xs]
    if f <= 26:
        return [x for x in xs if _TESTS[f - 23](x)]
    if f <= 31:
        scanned = xs[:1]
        for x in xs[1:]:
            scanned.append(_PAIRS[f - 27](scanned[-1], x))
        return scanned
    if f <= 36:
        return [_PAIRS[f - 32](a, b) for a, b in zip(before, xs, strict=False)]
    clipped = min(max(n, 0), len(xs))
    if f <= 38:
        return xs[:clipped] if f == 37 else xs[clipped:]
    return [x for x in xs if x != n] if f == 39 else [*xs, n]
