"""Formal languages with known entropy, a lower bound of every model's cross entropy."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from slipstream.errors import InvalidArgumentError
from slipstream_bench.generators._random import positive, streams

_BRACKETS = ("()", "[]", "{}", "<>")


@dataclass(frozen=True)
class FormalText:
    """A sequence of tokens and its predictability.

    Attributes:
        tokens: int64 [T], indices into `vocabulary`.
        vocabulary: one printable string per token.
        log_probabilities: float64 [T], natural logarithm of each token's probability given all
            earlier ones, under the generating process.
        entropy_nats: entropy rate of the process, in nats per token: the minimum mean cross entropy
            of any model on long sequences.
    """

    tokens: NDArray[np.int64]
    vocabulary: tuple[str, ...]
    log_probabilities: NDArray[np.float64]
    entropy_nats: float

    @property
    def text(self) -> str:
        """The concatenated tokens."""
        return "".join(self.vocabulary[token] for token in self.tokens)


def dyck(
    length: int, *, kinds: int = 2, p_open: float = 0.45, max_depth: int = 8, seed: int = 0
) -> FormalText:
    """Generate words of balanced brackets (a bounded Dyck language), separated by newlines.

    At depth d < `max_depth` the process opens a bracket of a uniformly random kind with probability
    `p_open`. Otherwise it closes the innermost one, or ends the word if none is open. At
    `max_depth` it closes. The depth is a birth-death chain, whose stationary distribution gives the
    entropy rate

        (1 - P(depth = max_depth)) * (H(p_open) + p_open * ln kinds).

    Args:
        length: number of tokens; the last word may be incomplete.
        kinds: number of kinds of brackets, 1 to 4.

    Raises:
        InvalidArgumentError: an argument is out of range.
    """
    positive(length=length, max_depth=max_depth)
    if not 1 <= kinds <= len(_BRACKETS):
        raise InvalidArgumentError("kinds", f"must be in 1..{len(_BRACKETS)}")
    if not 0 < p_open < 1:
        raise InvalidArgumentError("p_open", "must be between 0 and 1")
    (generator,) = streams(seed, 1)
    # Token 0 ends a word, 1..kinds open, the next `kinds` close.
    vocabulary = ("\n", *(b[0] for b in _BRACKETS[:kinds]), *(b[1] for b in _BRACKETS[:kinds]))
    opens = generator.random(length) < p_open
    which = generator.integers(0, kinds, length)
    log_open, log_close = math.log(p_open / kinds), math.log1p(-p_open)
    tokens = np.empty(length, dtype=np.int64)
    log_probabilities = np.empty(length)
    stack: list[int] = []
    for i in range(length):
        full = len(stack) == max_depth
        if opens[i] and not full:
            stack.append(int(which[i]))
            tokens[i] = 1 + which[i]
            log_probabilities[i] = log_open
        else:
            tokens[i] = 1 + kinds + stack.pop() if stack else 0
            log_probabilities[i] = 0.0 if full else log_close
    decision = -p_open * math.log(p_open / kinds) - (1 - p_open) * math.log1p(-p_open)
    return FormalText(
        tokens, vocabulary, log_probabilities, (1 - _share_full(p_open, max_depth)) * decision
    )


def arithmetic(
    expressions: int,
    *,
    digits: int = 2,
    operators: str = "+*",
    reverse: bool = True,
    seed: int = 0,
) -> FormalText:
    """Generate lines ``12+07=9100``: two random numbers, an operator, the result.

    Operands are uniform with `digits` digits, including leading zeros. The result has twice as many
    digits and follows from the tokens before it. A line of 4 * digits + 3 tokens therefore holds
    2 * digits * ln 10 + ln(operators) nats.

    Args:
        operators: a subset of ``+`` and ``*``, each with the same probability.
        reverse: write the result's last digit first, the order in which carries are computed.

    Raises:
        InvalidArgumentError: an argument is out of range.
    """
    positive(expressions=expressions)
    # The product of two nine-digit numbers still fits 64 bits.
    if not 1 <= digits <= 9:
        raise InvalidArgumentError("digits", "must be in 1..9")
    if not operators or set(operators) - set("+*") or len(set(operators)) != len(operators):
        raise InvalidArgumentError("operators", "must be some of + and *, without repetition")
    (generator,) = streams(seed, 1)
    vocabulary = (*"0123456789", *operators, "=", "\n")
    a, b = generator.integers(0, 10**digits, (2, expressions))
    operator = generator.integers(0, len(operators), expressions)
    times = np.array([sign == "*" for sign in operators])[operator]
    result = np.where(times, a * b, a + b)
    line = 4 * digits + 3
    tokens = np.empty((expressions, line), dtype=np.int64)
    log_probabilities = np.zeros((expressions, line))
    tokens[:, :digits] = _digits(a, digits)
    tokens[:, digits] = 10 + operator
    tokens[:, digits + 1 : 2 * digits + 1] = _digits(b, digits)
    tokens[:, 2 * digits + 1] = 10 + len(operators)
    shown = _digits(result, 2 * digits)
    tokens[:, 2 * digits + 2 : -1] = shown[:, ::-1] if reverse else shown
    tokens[:, -1] = 11 + len(operators)
    log_probabilities[:, : 2 * digits + 1] = -math.log(10)
    log_probabilities[:, digits] = -math.log(len(operators))
    information = 2 * digits * math.log(10) + math.log(len(operators))
    return FormalText(tokens.ravel(), vocabulary, log_probabilities.ravel(), information / line)


def _share_full(p_open: float, max_depth: int) -> float:
    """Return the stationary probability of the maximum depth.

    Detailed balance: p[d] * up = p[d + 1] * down, where down is 1 at the maximum depth.
    """
    ratio = p_open / (1 - p_open)
    law = [ratio**depth for depth in range(max_depth)]
    law.append(law[-1] * p_open)
    return law[-1] / sum(law)


def _digits(numbers: NDArray[np.int64], width: int) -> NDArray[np.int64]:
    """Return decimal digits, the most significant first, int64 [N, width]."""
    powers = 10 ** np.arange(width - 1, -1, -1, dtype=np.int64)
    return np.asarray(numbers[:, None] // powers % 10)
