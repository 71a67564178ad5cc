"""The scripts bench: failures count, and are named."""

from __future__ import annotations

from slipstream_bench.rows import Bar
from slipstream_bench.systems.scripts import Passage, overall


def rows(*passages: Passage) -> dict[str, Bar]:
    return {row.bar: row for row in overall(passages, advised=True)}


def test_a_command_that_failed_is_not_counted() -> None:
    found = rows(Passage("gan", succeeded=["profile", "predict"]), Passage("ema"))
    assert (found["predict succeeds"].value, found["predict succeeds"].holds) == (1, False)
    assert "ema" in found["predict succeeds"].detail
    # A script without steps is only profiled.
    alone = rows(Passage("manual_sgd", succeeded=["profile"]))
    assert (alone["profile succeeds"].unit, alone["predict succeeds"].unit) == ("of 1", "of 0")


def test_the_first_choice_of_advise_must_be_measured_in_time() -> None:
    (bar,) = (bar for bar in rows(Passage("gan")) if bar.startswith("advise: "))
    for passage, holds in (
        (Passage("gan", advise_s=50.0, best="amp:bf16", checked=True), True),
        (Passage("gan", advise_s=50.0), True),
        (Passage("gan", advise_s=50.0, best="amp:bf16"), False),
        (Passage("gan", advise_s=70.0, best="amp:bf16", checked=True), False),
    ):
        assert rows(passage)[bar].holds is holds


def test_a_closure_must_not_change_predictions_or_applicability() -> None:
    plain = Passage("bare_loop", predicted={"a": 1.00, "b": 2.0})
    (bar,) = (bar for bar in rows(plain, Passage("plain_closure")) if "plain_closure" in bar)
    for predicted, holds in (
        ({"a": 1.04, "b": 2.0}, True),
        ({"a": 1.06, "b": 2.0}, False),
        ({"a": 1.00}, False),
    ):
        assert rows(plain, Passage("plain_closure", predicted=predicted))[bar].holds is holds
