"""Entropies in closed form, checked by linear algebra, by counting and on samples."""

from __future__ import annotations

import itertools
import math
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.errors import InvalidArgumentError
from slipstream_bench.generators import arithmetic, dyck


def _entropy_by_linear_algebra(p: float, kinds: int, max_depth: int) -> float:
    """Entropy rate of the depth chain: stationary vector by eigenvalues, then the rows."""
    transition = np.zeros((max_depth + 1, max_depth + 1))
    for depth in range(max_depth):
        transition[depth, depth + 1] = p
        transition[depth, max(depth - 1, 0)] += 1 - p
    transition[max_depth, max_depth - 1] = 1
    values, vectors = np.linalg.eig(transition.T)
    law = np.real(vectors[:, np.argmin(abs(values - 1))])
    law /= law.sum()
    choice = -kinds * (p / kinds) * math.log(p / kinds) - (1 - p) * math.log(1 - p)
    return float(law[:max_depth].sum() * choice)


@settings(max_examples=40, deadline=None)
@given(p=st.floats(0.05, 0.95), kinds=st.integers(1, 4), max_depth=st.integers(1, 12))
def test_dyck_entropy_is_that_of_its_markov_chain(p: float, kinds: int, max_depth: int) -> None:
    stated = dyck(1, p_open=p, kinds=kinds, max_depth=max_depth).entropy_nats
    assert stated == pytest.approx(_entropy_by_linear_algebra(p, kinds, max_depth), rel=1e-8)


@pytest.mark.parametrize(("p", "depth"), [(0.3, 8), (0.45, 4), (0.7, 6)])
def test_true_model_reaches_the_dyck_entropy(p: float, depth: int) -> None:
    sample = dyck(200_000, p_open=p, max_depth=depth, kinds=3, seed=1)
    # Means of blocks of 1,000 tokens are nearly independent: their spread gives the error.
    blocks = -sample.log_probabilities.reshape(200, 1000).mean(axis=1)
    error = 4 * blocks.std() / 200**0.5
    assert blocks.mean() == pytest.approx(sample.entropy_nats, abs=error)


def test_dyck_probabilities_are_re_derived_by_a_parser() -> None:
    sample = dyck(20_000, kinds=2, p_open=0.4, max_depth=5, seed=2)
    pairs = {"(": ")", "[": "]"}
    stack: list[str] = []
    deepest = 0
    for letter, stated in zip(sample.text, sample.log_probabilities, strict=True):
        if letter in pairs:
            expected = 0.4 / 2
            stack.append(letter)
        elif letter == "\n":
            assert not stack
            expected = 0.6
        else:
            expected = 1.0 if len(stack) == 5 else 0.6
            assert pairs[stack.pop()] == letter
        deepest = max(deepest, len(stack))
        assert math.exp(stated) == pytest.approx(expected)
    assert deepest == 5


def test_dyck_contexts_split_as_stated() -> None:
    """Counted from the tokens alone: below the greatest depth, an opening has probability p."""
    sample = dyck(100_000, kinds=1, p_open=0.45, max_depth=6, seed=3)
    step = np.select([sample.tokens == 1, sample.tokens == 2], [1, -1], 0)
    before = np.concatenate([[0], np.cumsum(step)[:-1]])
    for depth in range(6):
        opened = sample.tokens[before == depth] == 1
        assert opened.mean() == pytest.approx(0.45, abs=4 * 0.5 / len(opened) ** 0.5)
    assert (sample.tokens[before == 6] == 2).all()


@pytest.mark.parametrize("reverse", [True, False])
def test_arithmetic_is_correct(reverse: bool) -> None:
    sample = arithmetic(2000, digits=3, reverse=reverse, seed=1)
    lines = sample.text.splitlines()
    assert len(lines) == 2000
    for line in lines:
        match = re.fullmatch(r"(\d{3})([+*])(\d{3})=(\d{6})", line)
        assert match is not None
        a, b = int(match[1]), int(match[3])
        result = int(match[4][::-1] if reverse else match[4])
        assert result == (a + b if match[2] == "+" else a * b)


def test_arithmetic_entropy_is_that_of_all_lines() -> None:
    """With one digit there are 200 lines, each as likely: their entropy is ln 200."""
    sample = arithmetic(20_000, digits=1, seed=2)
    lines = sample.text.splitlines()
    assert set(lines) == {
        f"{a}{sign}{b}={str(a + b if sign == '+' else a * b).zfill(2)[::-1]}"
        for a, sign, b in itertools.product(range(10), "+*", range(10))
    }
    assert sample.entropy_nats * 7 == pytest.approx(math.log(200))
    counts = np.array([lines.count(line) for line in sorted(set(lines))])
    # Chi-square with 199 degrees of freedom: mean 199, standard deviation 20.
    assert ((counts - 100) ** 2 / 100).sum() == pytest.approx(199, abs=4 * 20)
    # All lines are equally predictable, so the mean is exactly the entropy.
    assert -sample.log_probabilities.mean() == pytest.approx(sample.entropy_nats)


def test_nine_digits_do_not_overflow() -> None:
    for line in arithmetic(500, digits=9, operators="*", seed=3).text.splitlines():
        a, rest = line.split("*")
        b, result = rest.split("=")
        assert int(result[::-1]) == int(a) * int(b)


def test_one_operator_carries_no_information() -> None:
    sample = arithmetic(10, digits=2, operators="+")
    assert sample.entropy_nats * 11 == pytest.approx(4 * math.log(10))
    assert len(sample.vocabulary) == 13


def test_arguments_out_of_range_are_named() -> None:
    for argument, value in [("length", 0), ("kinds", 5), ("p_open", 1.0), ("max_depth", 0)]:
        with pytest.raises(InvalidArgumentError, match=argument):
            dyck(**({"length": 5} | {argument: value}))  # type: ignore[arg-type]
    for argument, value in [("digits", 10), ("operators", "-"), ("operators", "++")]:
        with pytest.raises(InvalidArgumentError, match=argument):
            arithmetic(**({"expressions": 5} | {argument: value}))  # type: ignore[arg-type]
