"""A number is as certain as its least certain input."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.provenance import Provenance, weakest

_some = st.lists(st.sampled_from(list(Provenance)), min_size=1)


@given(_some, _some)
def test_combining_is_associative_and_keeps_the_weakest(
    a: list[Provenance], b: list[Provenance]
) -> None:
    assert weakest([*a, *b]) == weakest([weakest(a), weakest(b)])
    assert weakest(a) in a


def test_measured_is_stronger_than_declared() -> None:
    assert weakest([Provenance.MEASURED, Provenance.USER]) is Provenance.USER
    assert weakest([Provenance.FITTED, Provenance.MICROBENCHMARK]) is Provenance.FITTED
    assert weakest([Provenance.SIMULATED, Provenance.DATASHEET]) is Provenance.DATASHEET


def test_an_empty_combination_has_no_provenance() -> None:
    with pytest.raises(ValueError, match="empty"):
        weakest([])


def test_it_is_shown_as_a_word() -> None:
    assert f"{Provenance.MEASURED}" == "measured"
