"""Tables of `prove` and `predict` on communication by layer, and on the link."""

from __future__ import annotations

import re
from typing import Any
from xml.etree import ElementTree

import pytest

from slipstream.measure.comparison import Comparison
from slipstream.measure.records import (
    AFTERWARDS,
    UNCHANGED,
    Environment,
    Event,
    Experiment,
    ExperimentSettings,
    PredictionRecord,
)
from slipstream.report.network import network_svg
from slipstream.verbs.proving.exposed import Wait, exposed_sides, exposed_table, link_table
from slipstream.verbs.sharing import no_longer_exposed


def detail(arm: str, layers_s: dict[str, float] | None, **changes: Any) -> dict[str, Any]:
    """Return the exposed times of a team of ranks: steps of 0.1 s on a link of 12.5 MB/s."""
    return {
        "arm": arm, "layers_s": layers_s, "line_bytes_per_s": 12.5e6, "sharing": 1,
        "order": ["model.a", "model.b", "model.c"], "how": "", "steps": 4, "step_s": 0.1,
        "link": {"sent": [0.0, 12.5e6], "received": [6.25e6, 6.25e6]},
        "drawn": {
            "stamps_s": [0.0, 0.1, 0.2], "waits_s": [[0.06, 0.1], [0.16, 0.2]],
            "times_s": [0.0, 0.05, 0.1, 0.2], "sent": [0, 0, 625_000, 1_250_000],
            "received": [0, 300_000, 625_000, 1_250_000],
        },
        **changes,
    }  # fmt: skip


def comparison(
    *details: dict[str, Any], step_ns: float = 100e6, **predicted: dict[str, float]
) -> Comparison:
    record = {
        name: PredictionRecord(
            "train", name, "wall", 1.0, 0.9, 1.1, "fitted", "2026-11-23T00:00:00Z", "env",
            {"exposed_by_layer": layers, "step_ns": step_ns},
        )
        for name, layers in predicted.items()
    }  # fmt: skip
    events = (
        Event(0, "note", {"what": "x"}),
        *(Event(3, AFTERWARDS, detail) for detail in details),
    )
    experiment = Experiment(
        "train", "2026-11-23T00:00:00Z", Environment({}, "env"),
        ExperimentSettings(UNCHANGED, budget_s=1.0), (), {}, events, record,
    )  # fmt: skip
    return Comparison(experiment, ())


BOTH = comparison(
    detail("ddp", {"model.b": 0.02, "model.c": 0.03}),
    detail(
        "priority",
        {"model.b": 0.01, "model.c": 0.001},
        how="static, slices of 50,000 numbers, 1 ahead",
    ),
    ddp={"model.c": 28e6, "model.b": 22e6},
    priority={"model.b": 12e6},
)


def test_layers_are_in_the_order_of_the_forward_pass_and_add_up() -> None:
    ddp, priority = exposed_sides(BOTH)
    assert [row.layer for row in ddp.layers] == ["model.a", "model.b", "model.c"]
    assert ddp.layers[0] == Wait("model.a", 0.0, 0.0)
    assert (ddp.predicted_ns, ddp.measured_ns) == (50e6, pytest.approx(50e6))
    assert (priority.predicted_ns, priority.how) == (
        12e6,
        "static, slices of 50,000 numbers, 1 ahead",
    )
    assert priority.step_ns == pytest.approx(100e6)


def test_unexposed_layers_share_a_line() -> None:
    table = exposed_table(exposed_sides(BOTH))
    assert [row[0] for row in table.rows] == ["model.b", "model.c", "1 other", "the step"]
    assert table.rows[1][1:] == ("28.0 ms, 30.0 ms", "0, 1.00 ms")
    assert table.rows[2][1:] == ("0, 0", "0, 0")
    notes = " ".join(table.notes)
    assert re.search(r"\b50,000\b.*\b1\b", notes)
    assert re.search(r"\bpredicted\b.*\b2\b.*\bhides\b.*\b1\b.*\bmodel\.c\b", notes)
    assert re.search(r"\bmeasured\b.*\b2\b.*\bhides\b.*\b1\b.*\bmodel\.c\b", notes)


def test_many_layers_are_folded() -> None:
    layers = {f"model.{n}": 0.001 * (n + 1) for n in range(40)}
    table = exposed_table(exposed_sides(comparison(detail("ddp", layers, order=list(layers)))))
    assert len(table.rows) == 14
    assert [row[0] for row in table.rows[:2]] == ["model.28", "model.29"]
    assert table.rows[-2] == ("28 others", f"-, {406:.0f} ms")
    assert table.rows[-1] == ("the step", f"-, {820:.0f} ms")


def test_unknown_times_are_not_shown_as_zero() -> None:
    rows = exposed_sides(comparison(detail("adasum", None), adasum={"model.a": 1e6}))
    assert rows[0].measured_ns is None
    table = exposed_table(rows)
    assert table.rows[0] == ("model.a", "1.00 ms, -")
    assert table.rows[-1] == ("the step", "1.00 ms, -")
    assert any("do not report waits" in note for note in table.notes)


def test_a_side_without_layers_hides_nothing() -> None:
    sides = [detail("ddp", {"model.b": 0.02, "model.c": 0.03}), detail("adasum", None)]
    for of_both in (sides, sides[::-1]):
        table = exposed_table(exposed_sides(comparison(*of_both, ddp={"model.b": 9e6})))
        assert not [note for note in table.notes if "hides" in note]
        place = 1 + of_both.index(sides[1])
        assert [row[place] for row in table.rows] == ["-, -"] * len(table.rows)


def test_a_step_that_hides_all_communication_reports_it() -> None:
    table = exposed_table(exposed_sides(comparison(detail("ddp", {}), ddp={})))
    assert table.rows == [("no layer", "0, 0"), ("the step", "0, 0")]


def test_links_are_shown_in_each_direction_with_the_configured_link() -> None:
    table = link_table(exposed_sides(BOTH))
    assert table.rows[0] == ("ddp", "sent", "50 Mbit/s", "50 %", "▁█")
    assert table.rows[1][1:] == ("received", "50 Mbit/s", "50 %", "▅▅")
    shared = detail("ddp", {}, line_bytes_per_s=0.0, sharing=2)
    table = link_table(exposed_sides(comparison(shared)))
    assert table.rows == [("ddp", "by all ranks", "50 Mbit/s", "-", "▁█")]
    assert any("loopback" in note for note in table.notes)


@pytest.mark.parametrize("sharing", [1, 2])
def test_the_image_has_a_panel_per_side(sharing: int) -> None:
    line = 12.5e6 if sharing == 1 else 0.0
    sides = [detail(name, {}, sharing=sharing, line_bytes_per_s=line) for name in ("ddp", "a<b&c")]
    drawn = network_svg("a & b", exposed_sides(comparison(*sides)))
    root = ElementTree.fromstring(drawn)
    text = "".join(root.itertext())
    assert "a<b&c: 100 ms per step" in text
    assert ("loopback" in text) is (sharing == 2)
    names = [element.tag.rpartition("}")[2] for element in root.iter()]
    assert names.count("path") == (4 if sharing == 1 else 2)
    # Two waits per side, and the legend.
    assert names.count("rect") == 4 + 3


def test_labels_below_a_short_panel_do_not_overlap() -> None:
    short = detail("fast", {})
    short["drawn"] = {
        **short["drawn"], "stamps_s": [0.0, 0.004, 0.008], "times_s": [0.0, 0.002, 0.004, 0.008],
        "waits_s": [],
    }  # fmt: skip
    drawn = network_svg("both", exposed_sides(comparison(detail("slow", {}), short)))
    root = ElementTree.fromstring(drawn)
    times: dict[str, list[float]] = {}
    for element in root.iter():
        if element.get("text-anchor") == "middle":
            times.setdefault(str(element.get("y")), []).append(float(str(element.get("x"))))
    slow, fast = times.values()
    assert (len(slow), len(fast)) == (3, 1)
    assert max(slow) + 26 <= float(str(root.get("width")))


@pytest.mark.parametrize(
    ("after", "message"),
    [
        ({"x": 9.0, "y": 9.0}, r"^$"),
        ({"x": 9.0, "y": 0.2}, r"\b2\b.*\bA\b.*\bB\b.*\b1: y$"),
        ({}, r"\b2\b.*\bA\b.*\bB\b.*\b2: x, y$"),
    ],
)
def test_layers_that_are_no_longer_exposed_are_named(after: dict[str, float], message: str) -> None:
    sentence = no_longer_exposed("A", {"x": 10.0, "y": 10.0, "tiny": 0.1}, "B", after)
    assert re.search(message, sentence)


@pytest.mark.parametrize(("step_ns", "noted"), [(100e6, False), (80e6, True)])
def test_ranks_that_compute_longer_than_predicted_are_reported(step_ns: float, noted: bool) -> None:
    both = comparison(detail("ddp", {"model.b": 0.05}), step_ns=step_ns, ddp={"model.b": 50e6})
    notes = " ".join(exposed_table(exposed_sides(both)).notes)
    assert bool(re.search(r"\bddp\b.*\b50\.0 ms\b.*\b30\.0 ms\b", notes)) is noted
