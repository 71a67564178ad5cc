"""Reports: predictions next to measurements, complete, and equal in all forms."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from made_up import claim, environment, experiment, prediction, series

from slipstream.errors import InvalidArgumentError, MeasurementError
from slipstream.measure.claims import claims
from slipstream.measure.history import steps
from slipstream.measure.page import comparison_html
from slipstream.measure.records import UNCHANGED, Event, ExperimentSettings, Phase, Verdict
from slipstream.measure.render import (
    compare_experiments,
    comparison_rows,
    comparison_table,
    format_value,
    gate_states,
    row_json,
    rows_payload,
    rows_table,
    unit_of,
)
from slipstream.tables import to_json


def test_one_line_has_prediction_and_measurement() -> None:
    table = comparison_table(experiment(predictions={"fast": prediction()}), [claim()])
    (row,) = table.to_records()
    assert row["what"] == "fast: cpu"
    assert row["change [95% CI]"] == "1.250x [1.235, 1.266]"
    assert row["verdict"] == "faster"
    assert row["predicted [90%]"] == "2.000x [1.600, 2.500]"
    assert row["error"] == "-37.5 % (outside)"
    assert row["detectable"] == "±1.2 %"
    assert row["blocks"] == 60
    assert row["gate"] == "green 40/60, amber 20/60"
    assert row["clock"] == "carries the claim"
    assert row["env"] == experiment().environment.env_id
    assert str(row["A"]).endswith("ms")


def test_the_arm_without_techniques_is_called_baseline() -> None:
    made = replace(experiment(), settings=ExperimentSettings(UNCHANGED))
    assert comparison_table(made, [claim()]).notes[0].startswith("A = baseline;")


def test_a_prediction_that_holds_is_not_outside() -> None:
    rows = comparison_rows(experiment(), [claim()], {"fast": prediction(ratio=0.78, high=0.9)})
    assert rows[0].inside
    assert rows[0].prediction_error == pytest.approx(0.78 / 0.8 - 1)


def test_a_too_noisy_measurement_is_neither_inside_nor_outside() -> None:
    noisy = claim(ratio=1.02, low=0.82, high=1.23, verdict=Verdict.INCONCLUSIVE)
    tight = {"fast": prediction(ratio=0.98, low=0.96, high=1.01)}
    (row,) = comparison_rows(experiment(), [noisy], tight)
    assert row_json(row)["inside"] is None
    (shown,) = comparison_table(experiment(), [noisy], tight).to_records()
    assert str(shown["error"]).endswith("(too noisy to tell)")


def test_times_are_speed_ups_and_sizes_are_percentages() -> None:
    found = [claim(metric="throughput"), claim(metric="peak_memory"), claim(metric="accuracy")]
    table = comparison_table(experiment(), found).to_records()
    assert [row["change [95% CI]"] for row in table] == [
        "0.800x [0.790, 0.810]", "-20.0 % [-21.0, -19.0]", "0.800 [0.790, 0.810]",
    ]  # fmt: skip


def test_predictions_of_several_metrics_find_their_rows() -> None:
    both = [prediction(ratio=0.7), prediction(metric="wall", ratio=0.9)]
    rows = comparison_rows(experiment(), [claim(), claim(metric="wall")], {"fast": both})
    assert [row.predicted.ratio for row in rows if row.predicted] == [0.7, 0.9]


def test_without_a_prediction_the_cell_is_empty() -> None:
    (row,) = comparison_table(experiment(), [claim()]).to_records()
    assert (row["predicted [90%]"], row["error"]) == ("-", "-")


def test_the_detectable_effect_is_always_shown() -> None:
    made = experiment()
    table = comparison_table(made, claims(made))
    column = [c.name for c in table.columns].index("detectable")
    assert not table.columns[column].optional
    assert all(re.fullmatch(r"±[\d.]+ %", str(row[column])) for row in table.rows)


def test_the_guard_is_below_every_result() -> None:
    made = experiment()
    table = comparison_table(made, claims(made))
    assert not any("base'" in str(row[0]) for row in table.rows)
    guards = [n for n in table.notes if n.startswith("A/A guard: ")]
    assert len(guards) == len({n.split(":")[1] for n in guards}) > 0
    assert any("base" in n and "cpu" in n for n in guards)


@pytest.mark.parametrize(
    ("low", "high", "says"),
    [
        (0.95, 1.1, "includes 1"),
        (0.417, 2.334, "too wide"),
        (0.9, math.inf, "too wide"),
        (1.1, 2.5, "does not include 1"),
    ],
)
def test_a_guard_without_enough_power_supports_nothing(low: float, high: float, says: str) -> None:
    guard = claim(arm="base'", ratio=(low * 1.2), low=low, high=high, carries=False)
    (line,) = [n for n in comparison_table(experiment(), [guard]).notes if "A/A guard" in n]
    assert re.search(rf"\bblocks: {says}\b", line)


def test_notes_are_below_the_table_once() -> None:
    what = "of 32 samples"
    note = Event(0, "note", {"what": what})
    made = experiment(events=(note, note))
    assert comparison_table(made, [claim()]).notes.count(f"{what}.") == 1
    payload = rows_payload(made, comparison_rows(made, [claim()]), [claim()])
    assert (payload["notes"], payload["warnings"]) == ([what], [])


def test_a_disturbed_machine_is_reported() -> None:
    assert any("not idle" in n for n in comparison_table(experiment(), [claim()]).notes)
    quiet = experiment(events=(Event(0, "gate", {"state": "green"}),))
    assert not any("not idle" in n for n in comparison_table(quiet, [claim()]).notes)


def test_an_undecided_verdict_reports_the_time_needed() -> None:
    undecided = claim(verdict=Verdict.INCONCLUSIVE, further_blocks=120)
    (row,) = comparison_table(experiment(), [undecided]).to_records()
    assert re.fullmatch(rf"{Verdict.INCONCLUSIVE.value}\b.*\b120\b.*", str(row["verdict"]))


def test_the_reason_for_the_clock_is_shown() -> None:
    table = comparison_table(experiment(), [claim(reason="threads: one each")])
    assert any(re.search(r"^fast\b.*\bcpu\b.*threads: one each", n) for n in table.notes)


def test_an_interrupted_experiment_is_marked() -> None:
    cut = experiment(status="interrupted")
    assert any("is interrupted" in note for note in comparison_table(cut, claims(cut)).notes)
    assert comparison_table(cut, ()).rows == []


def test_a_value_that_could_not_be_computed_is_a_dash() -> None:
    refused = claim(ratio=math.nan, low=0.0, high=math.inf, metric="cpu_p99", detectable=math.inf)
    (row,) = comparison_table(experiment(), [refused]).to_records()
    assert row["change [95% CI]"] == "-"
    assert row["detectable"] == "–"


def test_a_meaningless_value_is_a_dash_and_not_three_hundred_digits() -> None:
    wild = claim(ratio=3.457, low=0.0, high=math.inf, detectable=math.expm1(700.0), blocks=5)
    guard = replace(wild, arm="base'", low=1e-9, high=1e9, carries=False)
    table = comparison_table(experiment(), [wild, guard])
    (row,) = table.to_records()
    assert (row["change [95% CI]"], row["detectable"]) == ("0.289x [–, –]", "–")
    (line,) = [note for note in table.notes if "A/A guard" in note]
    assert "0.289x [–, –] at" in line
    assert not re.search(r"\d{8}", " ".join([*table.notes, str(row)]))


@pytest.mark.parametrize(
    ("state", "because"),
    [
        ("red", r"^faster, but\b.*\bbusy\b"),
        ("green", r"^faster, but\b.*\btoo few blocks\b"),
    ],
)
def test_an_unsupported_verdict_reports_it(state: str, because: str) -> None:
    guard = claim(arm="base'", ratio=1.0, low=0.4, high=2.3, carries=False)
    made = experiment(events=(Event(0, "gate", {"state": state}),))
    (row,) = comparison_table(made, [claim(), guard]).to_records()
    assert re.search(because, str(row["verdict"]))
    tight = replace(guard, low=0.97, high=1.03)
    (row,) = comparison_table(made, [claim(), tight]).to_records()
    assert row["verdict"] == "faster"
    silent = claim(verdict=Verdict.UNTRUSTWORTHY)
    (row,) = comparison_table(made, [silent, guard]).to_records()
    assert row["verdict"] == "not trustworthy"


@pytest.mark.parametrize(
    ("metric", "unit"),
    [
        ("wall", "ns"),
        ("cpu_p99", "ns"),
        ("peak_memory", "bytes"),
        ("wire_payload", "bytes"),
        ("throughput", "calls/s"),
        ("accuracy", ""),
    ],
)
def test_formats_units(metric: str, unit: str) -> None:
    assert unit_of(metric) == unit


def test_formats_values() -> None:
    assert format_value(2.5e6, "ns") == "2.50 ms"
    assert format_value(2048, "bytes") == "2.00 KiB"
    assert format_value(0.91234, "") == "0.9123"
    assert format_value(None, "ns") == "-"


def test_derived_metrics_show_their_own_statistic() -> None:
    wall = series([1e6] * 90 + [5e6] * 10)
    made = experiment(
        series={(arm, "wall", Phase.MEASURE): wall for arm in ("base", "fast")},
    )
    rows = comparison_rows(made, [claim(metric="wall_p99"), claim(metric="throughput")])
    assert rows[0].value == 5e6
    assert rows[1].value == pytest.approx(1e9 / 1.4e6)


def test_the_gate_is_shown_until_it_changes() -> None:
    made = experiment(
        blocks=10,
        events=tuple(
            Event(b, "gate", {"state": s}) for b, s in ((0, "green"), (4, "red"), (6, "green"))
        ),
    )
    assert gate_states(made) == {"green": 8, "red": 2}
    assert gate_states(experiment(events=())) == {}


def test_json_has_everything_that_the_table_shows() -> None:
    made = experiment(predictions={"fast": prediction()})
    found = claims(made)
    rows = comparison_rows(made, found)
    payload = json.loads(to_json(rows_payload(made, rows, found)))
    row = payload["rows"][0]
    assert row["speedup"] == 1 / found[0].ratio
    assert row["speedup_interval"] == [1 / found[0].high, 1 / found[0].low]
    assert (row["predicted_speedup"], row["predicted_speedup_interval"]) == (2.0, [1.6, 2.5])
    assert not {"ratio", "low", "high"} & {*row, *row["predicted"], *payload["claims"][0]}
    assert row["detectable"] == found[0].detectable
    assert payload["warnings"][0]["detail"]["what"] == "<b>odd</b>"
    assert payload["environment"]["facts"]["cpu.model"] == "Testor 3000"


class _Reader(HTMLParser):
    """Tags, attributes and text of a page; raises for tags that are not closed."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in ("meta",):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.text += data


def _page(html: str) -> _Reader:
    reader = _Reader()
    reader.feed(html)
    reader.close()
    assert reader.open == []
    return reader


def test_the_page_is_self_contained_in_light_and_dark() -> None:
    made = experiment(predictions={"fast": prediction()})
    html = comparison_html(made, claims(made))
    page = _page(html)
    assert "script" not in page.tags
    assert not [value for name, value in page.attributes if name in ("src", "href")]
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    assert "prefers-color-scheme: dark" in html
    assert "color-scheme: light dark" in html
    assert "url(" not in html
    assert "2.000x [1.600, 2.500]" in page.text
    assert "Testor 3000" in page.text
    assert "svg" in page.tags


def test_external_text_is_escaped() -> None:
    nasty = '<script>alert("x")</script>'
    made = experiment(title=nasty, environment=environment(cpu_model=nasty))
    page = _page(comparison_html(made, [claim(arm=nasty, reason=nasty)]))
    assert "script" not in page.tags
    assert nasty in page.text


def test_a_page_without_ratios_is_rendered() -> None:
    _page(comparison_html(experiment(), ()))
    _page(comparison_html(experiment(), [claim(ratio=math.nan, low=0.0, high=math.inf)]))


def test_experiments_of_different_environments_are_not_compared() -> None:
    a, b = experiment(), experiment(environment=environment(torch_threads=8, git_dirty="x"))
    with pytest.raises(MeasurementError) as caught:
        compare_experiments(a, b)
    assert "git.dirty, torch.threads" in caught.value.what
    assert "--unpaired" in (caught.value.remedy or "")


def test_on_request_they_are_and_every_row_reports_it() -> None:
    a, b = experiment(), experiment(environment=environment(torch_threads=8))
    rows = compare_experiments(a, b, unpaired=True)
    (mark,) = {row.mark for row in rows}
    assert mark.startswith("unpaired")
    assert mark.endswith(": torch.threads"), "what differs, and nothing else"
    table = rows_table(rows)
    assert [c.name for c in table.columns][-1] == "mark"
    assert all("unpaired" in str(row[-1]) for row in table.rows)
    assert {row.verdict for row in rows} == {"unpaired"}


def test_an_unpaired_ratio_is_that_of_the_medians_with_a_wider_interval() -> None:
    a = experiment()
    key = ("base", "cpu", Phase.MEASURE)
    slower = {k: replace(s, values=1.5 * s.values) for k, s in a.series.items()}
    (row,) = (
        r for r in compare_experiments(a, replace(a, series=slower)) if (r.arm, r.metric) == key[:2]
    )
    assert row.ratio == pytest.approx(1.5)
    assert row.low < 1.5 < row.high
    assert row.mark == "unpaired, same environment"
    (paired,) = (c for c in claims(a) if c.metric == "cpu" and c.arm == "fast")
    assert math.log(row.high / row.low) > math.log(paired.high / paired.low)


def test_zero_cost_has_no_ratio() -> None:
    free = experiment(series={("base", "wire_payload", Phase.MEASURE): series([0.0] * 20)})
    paid = experiment(series={("base", "wire_payload", Phase.MEASURE): series([8.0] * 20)})
    (row,) = compare_experiments(free, free)
    assert math.isnan(row.ratio)
    assert compare_experiments(free, paid)[0].ratio == math.inf
    assert compare_experiments(paid, free)[0].ratio == 0
    rows_table(compare_experiments(free, paid)).to_markdown()


def test_diagnostics_and_the_guard_are_not_compared() -> None:
    made = experiment()
    extra = {("base", "run_delay", Phase.MEASURE): series([0.0])}
    more = replace(made, series={**made.series, **extra})
    assert {(r.arm, r.metric) for r in compare_experiments(more, more)} == {
        (arm, metric) for arm in ("base", "fast") for metric in ("wall", "cpu")
    }


def test_experiments_with_nothing_in_common() -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        compare_experiments(experiment(), experiment(series={}))
    assert caught.value.argument == "experiments"
    assert "slipstream results ls" in (caught.value.remedy or "")


def _history(*ratios: float, **last: object):
    made = [
        (experiment(experiment_id=f"e{n}"), [claim(ratio=r, low=r - 0.01, high=r + 0.01)])
        for n, r in enumerate(ratios)
    ]
    made[-1] = (replace(made[-1][0], **last), made[-1][1])
    return made


def test_an_increase_is_a_regression_and_a_decrease_is_not() -> None:
    found = steps(_history(0.8, 0.805, 0.9, 0.7))
    assert [(s.before, s.after, s.worse, s.latest) for s in found] == [
        ("e1", "e2", True, False),
        ("e2", "e3", False, True),
    ]


def test_a_change_names_the_revisions_and_other_differences() -> None:
    place = environment(git_revision="f" * 40, git_dirty="1", torch_threads=8)
    (step,) = steps(_history(0.8, 0.9, environment=place))
    assert step.revisions == ("no revision", "f" * 10 + "+")
    assert step.differing == ("torch.threads",)


@pytest.mark.parametrize(
    "change",
    [{"title": "something else"}, {"arms": ()}],
    ids=["title", "arms"],
)
def test_only_equal_experiments_are_compared(change: dict[str, object]) -> None:
    assert steps(_history(0.8, 0.9, **change)) == ()


def test_more_throughput_is_not_a_regression() -> None:
    made = [(e, [replace(c[0], metric="throughput")]) for e, c in _history(0.8, 0.9)]
    (step,) = steps(made)
    assert not step.worse


def test_settings_of_another_level_appear_in_the_heading() -> None:
    made = experiment(settings=ExperimentSettings("base", level=0.99))
    names = [c.name for c in comparison_table(made, [claim(level=0.99)]).columns]
    assert "change [99% CI]" in names
