"""Spaces and candidates: identity, counting and rules, one at a time and vectorised."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.errors import InvalidArgumentError, UnknownNameError
from slipstream.search import (
    Bool,
    Categorical,
    Choice,
    Float,
    Int,
    Permutation,
    Sequence,
    Space,
    Subset,
)
from slipstream.search.space import every

FINITE = st.one_of(
    st.builds(lambda lo, n, step: Int(lo, lo + n, step), st.integers(-9, 9), st.integers(0, 9),
              st.integers(1, 3)),
    st.builds(lambda lo, n, step: Float(lo / 10, (lo + n) / 10, step=step), st.integers(-9, 9),
              st.integers(0, 9), st.sampled_from([0.1, 0.25, 3.0])),
    st.just(Bool()),
    st.builds(lambda n, o: Categorical(tuple("abcdef"[:n]), o), st.integers(1, 6), st.booleans()),
    st.builds(Permutation, st.integers(1, 4)),
    st.builds(lambda n, k: Subset(tuple("abcde"[:n]), min(n, k)), st.integers(1, 5),
              st.integers(0, 5)),
    st.builds(lambda n, lo, more: Sequence(tuple("xyz"[:n]), lo, lo + more), st.integers(1, 3),
              st.integers(0, 2), st.integers(0, 2)),
)  # fmt: skip
ANY = st.one_of(FINITE, st.builds(lambda lo: Float(lo, 10 * lo, True), st.floats(1e-3, 1e3)))


def trees(leaf: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    def mapping(values: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
        return st.dictionaries(st.sampled_from(["a", "b", "c", "d"]), values, min_size=1)

    inner = st.one_of(leaf, mapping(leaf), mapping(mapping(leaf)).map(Choice))
    return mapping(inner)


def reordered(tree: Any) -> Any:
    """Return the same definition with every mapping and choice in reverse order."""
    if isinstance(tree, Choice):
        return Choice(reordered(tree.branches))
    if not isinstance(tree, dict):
        return tree
    return {name: reordered(inner) for name, inner in reversed(tree.items())}


def unsorted(data: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON of a space with the branches of its choices in another order."""
    above = {
        path for parameter in data["parameters"].values() for path in parameter.get("when", ())
    }
    parameters = {
        path: {**parameter, "choices": parameter["choices"][::-1]} if path in above else parameter
        for path, parameter in data["parameters"].items()
    }
    return {**data, "parameters": parameters}


@given(trees(ANY), st.integers(0, 2**32))
def test_a_candidate_round_trips_through_json_and_reordered_definitions(
    tree: dict[str, Any], seed: int
) -> None:
    space = Space(tree)
    turned = Space(reordered(tree))
    again = Space.from_json(json.loads(json.dumps(space.to_json())))
    assert space.id == turned.id == again.id
    assert space.id == Space.from_json(unsorted(space.to_json())).id
    made = space.sample(np.random.default_rng(seed))
    assert space.load(made.json).id == made.id
    shuffled = dict(reversed(made.config.items()))
    assert turned.candidate(shuffled).id == made.id
    assert space.from_units(space.to_units(made).tolist()).values.keys() == made.values.keys()


@given(trees(FINITE))
def test_numbers_and_candidates_are_one_to_one(tree: dict[str, Any]) -> None:
    space = Space(tree)
    assert space.size is not None
    numbers = range(0, space.size, max(1, space.size // 200))
    made = [space.from_index(number) for number in numbers]
    assert [space.to_index(candidate) for candidate in made] == list(numbers)
    assert len({candidate.id for candidate in made}) == len(made)
    for sample in made[:20]:
        assert space.from_units(space.to_units(sample).tolist()) == sample


def test_ties_may_derive_from_ties_in_any_order() -> None:
    ties = {"c": "a + b", "b": "a + 1", "a": "2 * net.mlp.width"}
    tree = {"net": Choice(mlp={"width": Int(1, 4)}, none={})}
    space = Space(tree, ties=ties, forbid=["c > 10"])
    assert space.candidate({"net": "mlp", "net.mlp.width": 2}).config == {
        "net": "mlp", "net.mlp.width": 2, "a": 4, "b": 5, "c": 9,
    }  # fmt: skip
    assert space.candidate({"net": "none"}).config == {"net": "none"}
    columns = space.sample_columns(200, np.random.default_rng(0))
    rows = [space.row(columns, at) for at in range(200)]
    assert space.allowed(columns).tolist() == [space.broken_rule(row) is None for row in rows]
    assert space.id == Space(tree, ties=dict(reversed(ties.items())), forbid=["c > 10"]).id


def test_a_float_with_a_step_has_decimal_values() -> None:
    space = Space({"dropout": Float(0.1, 0.75, step=0.1)})
    assert [candidate.values["dropout"] for candidate in every(space)] == [
        0.1,
        0.2,
        0.3,
        0.4,
        0.5,
        0.6,
        0.7,
    ]
    assert space.candidate({"dropout": 0.1 + 0.2}).values == {"dropout": 0.3}
    rng = np.random.default_rng(0)
    columns = space.sample_columns(500, rng)
    assert set(columns["dropout"]) == {candidate.values["dropout"] for candidate in every(space)}
    points = [space.to_units(space.row(columns, at))[0] for at in range(500)]
    np.testing.assert_allclose(space.encode(columns)[:, 0], points, rtol=1e-6)
    assert "step" not in str(Space({"dropout": Float(0, 1)}).to_json())


@pytest.mark.parametrize(
    "parameter", [Int(1, 40, log=True), Int(16, 512, step=16, log=True)], ids=str
)
def test_logarithmic_integers_are_floats_with_a_range_half_a_step_wider(parameter: Int) -> None:
    floats = Float(parameter.lo - 0.5, parameter.hi + 0.5, log=True)
    for value in range(parameter.lo, parameter.hi + 1, parameter.step):
        (unit,) = parameter.to_units(value)
        assert unit == pytest.approx(floats.to_units(value)[0])
        assert parameter.from_units([unit]) == value


def test_inactive_values_are_ignored() -> None:
    space = Space({"net": Choice(mlp={"width": Int(1, 9)}, none={})})
    with_rest = space.candidate({"net": "none", "net.mlp.width": 4})
    assert with_rest.id == space.candidate({"net": "none"}).id
    assert with_rest.values == {"net": "none"}


def test_mutations_and_crossovers_stay_inside() -> None:
    space = Space(
        {"net": Choice(mlp={"width": Int(16, 512)}, cnn={"depth": Int(1, 8), "wide": Bool()}),
         "lr": Float(1e-4, 1e-1, log=True), "order": Permutation(4)},
        forbid=["net.mlp.width > 256 and lr > 0.01"],
    )  # fmt: skip
    rng = np.random.default_rng(0)
    first, other = space.sample(rng), space.sample(rng)
    for _ in range(300):
        made = space.mutate(space.crossover(first, other, rng), rng)
        assert space.candidate(made.config).id == made.id
        first, other = made, first


def test_rules_over_arrays_equal_those_over_candidates() -> None:
    space = Space(
        {"net": Choice(mlp={"width": Int(16, 512)}, cnn={"depth": Int(1, 8)}),
         "lr": Float(1e-4, 1e-1, log=True), "act": Categorical(["relu", "gelu"])},
        ties={"twice": "2 * net.mlp.width"},
        forbid=["net.mlp.width > 256 and lr > 0.01 or net.mlp.width < 20",
                "act in ('gelu',) and not 2 <= net.cnn.depth < 7",
                "twice > 900", "max((lr, 0.001)) > 0.09",
                "max(lr, 0.05) > 0.05 if act == 'relu' else lr < 0.0002"],
    )  # fmt: skip
    columns = space.sample_columns(3000, np.random.default_rng(1))
    rows = [space.row(columns, at) for at in range(3000)]
    one_by_one = [space.broken_rule(row) is None for row in rows]
    assert space.allowed(columns).tolist() == one_by_one
    points = space.encode(columns)
    for at in range(0, 3000, 100):
        inactive = np.isnan(points[at])
        np.testing.assert_allclose(
            np.where(inactive, 0.5, points[at]), space.to_units(rows[at]), atol=1e-6
        )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Space({}), "no parameter"),
        (lambda: Space({"a b": Bool()}), "not a valid name"),
        (lambda: Space({"a": Int(3, 2)}), "empty"),
        (lambda: Space({"a": Float(0, 1, log=True)}), "logarithmic"),
        (lambda: Space({"a": Float(0, 1, step=0)}), "step=0.0 is not positive"),
        (lambda: Space({"a": Float(1, 9, log=True, step=1)}), "cannot be combined"),
        (
            lambda: Space({"a": Float(0, 1, step=0.25)}).candidate({"a": 0.3}),
            "multiple of the step 0.25",
        ),
        (lambda: Space({"a": Categorical([])}), "choices is empty"),
        (lambda: Space({"a": Int(0, 9)}, forbid=["a > 5", "a <= 5"]).check(), "each of its 10"),
        (lambda: Space({"a": Float(0, 1)}, forbid=["a < 2"]).check(), "is empty"),
        (lambda: Space({"a": Int(0, 9)}, forbid=["__import__('os')"]), "not allowed"),
        (lambda: Space({"a": Int(0, 9)}, forbid=["a ** a > 3"]), "exponent"),
        (lambda: Space({"a": Int(0, 9)}, forbid=["a ** 65 > 3"]), "exponent"),
        (lambda: Space({"a": Int(0, 9)}).candidate({"a": 10}), "range 0 to 9"),
        (lambda: Space({"a": Int(0, 9)}).candidate({}), "the value is missing"),
        (lambda: Space({"a": Bool()}, ties={"b": "c + 1", "c": "b + 1"}), "c -> b|b -> c"),
        (lambda: Space({"a": Bool()}, ties={"b": "b + a"}), "b -> b"),
        (lambda: Space({"a": Int(0, 9)}, forbid=["1 / a > 2"]).check(), "'1 / a > 2'.* a=0: div"),
        (lambda: Space({"a": Categorical(["x"])}, forbid=["a > 2"]).check(), "at a='x'"),
        (lambda: Space({"a": Choice({1: {}})}), "not a valid name"),
    ],
)
def test_an_invalid_space_is_reported(make: Any, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        make()


def test_a_rule_about_an_unknown_parameter_suggests_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match=r"\bwidht\b(.|\n)*\bwidth\?"):
        Space({"width": Int(1, 2)}, forbid=["widht > 1"])
