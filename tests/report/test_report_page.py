"""The page in a real browser: it draws, reacts to switches and keys, and makes no requests.

The browser is one for all tests here; reports are written once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from reports import AlikeDurations, Report, empty_graph, without_memory

from slipstream.graph import replay
from slipstream.measure.comparison import Comparison
from slipstream.measure.environment import capture
from slipstream.measure.records import (
    UNCHANGED,
    ArmRecord,
    Claim,
    Experiment,
    ExperimentSettings,
    Verdict,
)
from slipstream.report import write_report
from slipstream_bench.browser import Browser, axe_core, browser, missing
from slipstream_bench.systems.report import repeated
from tiny_models import captured

Require = Callable[[str, bool, str], None]
VIEWS = ("overview", "timeline", "breakdown", "memory", "movement", "whatifs", "history", "run")
SWITCH = "return [...document.querySelectorAll('.switch')].find(s => s.textContent.includes('%s'))"
FIGURES = "return document.querySelector('.outcome').innerText"
SHOWN = "return document.querySelector('.tools .grow + .faint').innerText"


@pytest.fixture(scope="module")
def page(require: Require) -> Iterator[Browser]:
    reason = missing()
    require("chromium", reason is None, reason or "")
    with browser() as found:
        yield found


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    techniques = ["fused_optimizer:fused", "checkpointing", "accumulation:4", "channels_last"]
    graph = captured("transformer")
    return write_report(
        graph, folder / "r.html", techniques=techniques, durations=AlikeDurations(),
        store=folder / "none.db",
    )  # fmt: skip


def keys(page: Browser, *pressed: str, on: str = "body") -> None:
    """Press keys at the current focus, after focusing `on` if set."""
    page.run("document.querySelector(arguments[0]).focus()", on)
    for key in pressed:
        for kind in ("keyDown", "keyUp"):
            text = {"text": key} if len(key) == 1 and kind == "keyDown" else {}
            page.command("Input.dispatchKeyEvent", type=kind, key=key, **text)
    settle(page)


def settle(page: Browser) -> None:
    """Wait until the requested state is on the screen."""
    page.wait(
        "const done = arguments[arguments.length - 1];"
        "requestAnimationFrame(() => requestAnimationFrame(() => done()))"
    )


def header(page: Browser, folder: Path, median: float) -> str:
    """Return the header's figures for a step recorded at `median` times its simulated time."""
    graph = captured("transformer")
    wall = {**graph.meta["step_ns"], "wall_median": replay(graph).step_ns * median}
    graph = replace(graph, meta={**graph.meta, "step_ns": wall})
    path = write_report(
        graph, folder / "r.html", techniques=[], durations=AlikeDurations(), store=folder / "n.db"
    )
    page.open(path)
    return str(page.run("return document.querySelector('.figures').innerText"))


def test_the_header_separates_idle_time_from_measured_time(page: Browser, tmp_path: Path) -> None:
    calm, busy = header(page, tmp_path, 1.1), header(page, tmp_path, 5.0)
    assert "idle" in calm
    assert "measured median" not in calm
    # Each figure is on its own line.
    lines = [line for line in busy.splitlines() if line.startswith("measured median: ")]
    assert len(lines) == 2
    assert any(line.endswith("when recorded again on an idle core") for line in busy.splitlines())


def view(page: Browser) -> str:
    return str(page.run("return document.querySelector('[role=tab][aria-selected=true]').id"))


def test_no_view_logs_errors_or_makes_requests(page: Browser, path: Path) -> None:
    page.open(path)
    for name in VIEWS:
        page.run(f"document.getElementById('tab-{name}').click()")
        settle(page)
        assert len(page.run("return document.getElementById('view').innerText")) > 30
        # Wide content scrolls in its own box, never the page.
        assert page.run("return document.documentElement.scrollWidth <= innerWidth")
    assert page.requests() == []
    assert page.errors() == []


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_every_view_is_accessible(page: Browser, path: Path, dark: bool, require: Require) -> None:
    axe = axe_core()
    require("chromium", axe is not None, "axe-core is not installed: npm ci in page/")
    assert axe is not None
    page.open(path, dark=dark)
    for name in VIEWS:
        page.run(f"document.getElementById('tab-{name}').click()")
        settle(page)
        assert page.violations(axe) == [], name


def test_a_switch_changes_the_numbers_and_the_timeline(page: Browser, path: Path) -> None:
    found = Report(path).document["what_ifs"]["predictions"]
    both = next(p for p in found if {*p["parts"]} == {"checkpointing", "fused_optimizer:fused"})
    page.open(path, view="timeline")
    before = page.run(FIGURES)
    whole = page.run(SHOWN)
    page.run(SWITCH % "checkpointing" + ".querySelector('input').click()")
    page.run(SWITCH % "fused_optimizer:fused" + ".querySelector('input').click()")
    settle(page)
    after = page.run(FIGURES)
    assert f"{both['speedup']:.2f}x" in after
    assert after != before
    assert page.run(SHOWN) != whole
    page.run("[...document.querySelectorAll('aside > button')].at(-1).click()")
    settle(page)
    assert page.run(FIGURES) == before
    assert page.run(SHOWN) == whole


def test_settings_of_one_technique_exclude_each_other(page: Browser, tmp_path: Path) -> None:
    techniques = ["accumulation:2", "accumulation:4"]
    graph = captured("transformer")
    path = write_report(
        graph, tmp_path / "r.html", techniques=techniques, durations=AlikeDurations()
    )
    page.open(path)
    for technique in techniques:
        page.run(SWITCH % technique + ".querySelector('input').click()")
        settle(page)
        on = page.run("return [...document.querySelectorAll('.switch.on')].map(s => s.innerText)")
        assert [text.split("\n")[0] for text in on] == [technique]


def test_an_unsimulated_combination_is_reported(
    page: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipstream.report.what_if._MAX_COMBINATIONS", 0)
    techniques = ["fused_optimizer:fused", "checkpointing"]
    graph = captured("transformer")
    path = write_report(
        graph, tmp_path / "r.html", techniques=techniques, durations=AlikeDurations()
    )
    page.open(path)
    for technique in techniques:
        page.run(SWITCH % technique + ".querySelector('input').click()")
    settle(page)
    figures = page.run(FIGURES)
    assert "not simulated" in figures
    assert "--technique fused_optimizer:fused+checkpointing" in figures


def test_a_measured_speed_up_is_next_to_the_predicted_one(page: Browser, tmp_path: Path) -> None:
    graph = captured("transformer")
    techniques = ["fused_optimizer:fused", "checkpointing"]
    arms = tuple(ArmRecord(name) for name in (UNCHANGED, techniques[0]))
    claim = Claim(
        "cpu", techniques[0], UNCHANGED, "median", 0.5, 0.4, 0.625, 0.95, Verdict.FASTER, 0.01, 60
    )
    experiment = Experiment(
        graph.meta["workload"], "2026-01-03T00:00:00Z", capture(torch=False),
        ExperimentSettings(UNCHANGED), arms, {},
    )  # fmt: skip
    path = write_report(
        graph, tmp_path / "r.html", techniques=techniques, durations=AlikeDurations(),
        store=tmp_path / "none.db", comparisons=[Comparison(experiment, (claim,))],
    )  # fmt: skip
    predictions = Report(path).document["what_ifs"]["predictions"]
    predicted = next(p for p in predictions if p["technique"] == techniques[0])
    assert predicted["measured"]["speedup"] == 2.0
    page.open(path, view="whatifs")
    cells = {
        name: page.run(
            "return [...document.querySelectorAll('.ranking tbody tr')]"
            f".find(r => r.innerText.startsWith('{name}')).cells[2].innerText"
        )
        for name in techniques
    }
    held = "inside" if predicted["measured"]["inside"] else "outside"
    assert cells == {techniques[0]: f"2.00x\n[1.60, 2.50]\n{held}", techniques[1]: "–"}
    text = page.run("return document.getElementById('view').innerText")
    assert "slipstream prove WORKLOAD --technique checkpointing" in text


def test_long_names_are_abbreviated_in_the_middle_and_accessible_in_full(
    page: Browser, tmp_path: Path
) -> None:
    graph = captured("transformer")
    long = "_scaled_dot_product_flash_attention_for_cpu_backward"
    # Slow enough to be among the top operators on every CPU.
    index = graph.strings.index(f"aten::{long}")
    slow = np.where(graph.tasks.name == index, 1e8, graph.tasks.duration_ns)
    graph = replace(graph, tasks=replace(graph.tasks, duration_ns=slow))
    page.open(
        write_report(
            graph, tmp_path / "r.html", techniques=[], durations=AlikeDurations(),
            store=tmp_path / "n.db",
        )
    )  # fmt: skip
    title, text, head, tail, label = page.run(
        "const one = [...document.querySelectorAll('.top .middle')]"
        ".find(e => e.title === arguments[0]);"
        "const [head, tail] = one.children;"
        "one.style.width = `${tail.offsetWidth + 20}px`;"
        "return [one.title, one.textContent, head.scrollWidth > head.clientWidth,"
        " tail.scrollWidth > tail.clientWidth, one.closest('button').ariaLabel]",
        long,
    )
    assert title == long
    assert text == title
    assert (head, tail) == (True, False)
    assert re.fullmatch(rf"{re.escape(title)}: .*\btimeline", label)


def test_the_keyboard_reaches_everything(page: Browser, path: Path) -> None:
    page.open(path)
    keys(page, "2")
    assert view(page) == "tab-timeline"
    whole = page.run(SHOWN)
    keys(page, "ArrowUp", "ArrowRight", on=".lanes")
    zoomed = page.run(SHOWN)
    assert zoomed != whole
    keys(page, "n", "n", on=".lanes")
    assert "critical path" in page.run("return document.querySelector('.detail').innerText")
    keys(page, "Home", on=".lanes")
    assert page.run(SHOWN) == whole
    keys(page, "ArrowRight", on="#tab-timeline")
    assert view(page) == "tab-breakdown"
    dark = "return document.documentElement.dataset.theme"
    before = page.run(dark)
    keys(page, "t")
    assert page.run(dark) != before
    keys(page, "?")
    assert page.run("return document.querySelector('dialog').open")
    # Tab stops: one for the views, then what the view and the switchboard have.
    stops = page.run("return [...document.querySelectorAll('[role=tab]')].map(t => t.tabIndex)")
    assert sorted(stops) == [-1] * 7 + [0]


def test_search_finds_an_operator_and_navigates_to_it(page: Browser, path: Path) -> None:
    page.open(path, view="timeline")
    page.run(
        "const box = document.getElementById('search'); box.value = 'gelu_backward';"
        "box.dispatchEvent(new Event('input', {bubbles: true}))"
    )
    settle(page)
    assert "2 tasks" in page.run("return document.querySelector('.tools').innerText")
    keys(page, "Enter", on="#search")
    assert "gelu_backward" in page.run("return document.querySelector('.detail h3').innerText")


def test_movement_shows_possible_savings_and_their_place(page: Browser, path: Path) -> None:
    movement = Report(path).document["movement"]
    page.open(path, view="movement")
    shown = "return document.querySelector('#view').innerText"
    assert movement["sentence"] in page.run(shown)
    assert "at most" in movement["sentence"]
    for name, rows in movement["groups"].items():
        buttons = "[...document.querySelectorAll('.choice button')]"
        page.run(f"{buttons}.find(b => b.innerText === '{name}').click()")
        settle(page)
        count = page.run("return document.querySelectorAll('.movement tbody tr').length")
        assert count == len(rows) > 0, name
        operations = "[...document.querySelectorAll('.movement tbody td:nth-child(7)')]"
        texts = page.run(f"return {operations}.map(cell => cell.innerText)")
        assert [text for text in texts if not re.fullmatch(r"\d{1,3}|\d[\d.]+ [kMGT]", text)] == []
    moved = {
        name: sum(row["moved_bytes"] for row in rows) for name, rows in movement["groups"].items()
    }
    assert len(set(moved.values())) == 1, "every byte has a class, a source line and a phase"


def test_the_breakdown_adds_up(page: Browser, path: Path) -> None:
    step_ns = Report(path).document["run"]["step_ns"]
    page.open(path, view="breakdown")
    foot = page.run("return document.querySelector('tfoot').innerText")
    assert "100.0 %" in foot
    for group in ("source line", "operator", "kind of work"):
        page.run(
            "[...document.querySelectorAll('.choice button')]"
            f".find(b => b.textContent === '{group}').click()"
        )
        settle(page)
        assert page.run("return document.querySelector('tfoot').innerText") == foot
    assert step_ns > 0


def test_empty_graph_and_missing_memory_are_designed_states(page: Browser, tmp_path: Path) -> None:
    empty = write_report(empty_graph(), tmp_path / "empty.html", store=tmp_path / "none.db")
    bare = without_memory(captured("mlp"))
    bare_path = write_report(bare, tmp_path / "bare.html", what_if=False)
    page.open(empty)
    for name in VIEWS:
        page.run(f"document.getElementById('tab-{name}').click()")
        settle(page)
        assert len(page.run("return document.getElementById('view').innerText")) > 30
    assert page.errors() == []
    page.open(bare_path, view="memory")
    assert "not recorded" in page.run("return document.getElementById('view').innerText")
    page.open(bare_path, view="history")
    assert page.errors() == []


def test_an_unreadable_report_is_reported(page: Browser, path: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.html"
    text = path.read_text(encoding="utf-8")
    at = text.index('id="arrays">') + len('id="arrays">')
    broken.write_text(text[:at] + "AAAA" + text[at + 4 :], encoding="utf-8")
    page.open(broken)
    assert "cannot be drawn" in page.run("return document.body.innerText")


@pytest.mark.full
def test_two_hundred_thousand_tasks_are_drawn(page: Browser, tmp_path: Path) -> None:
    transformer = captured("transformer")
    graph = repeated(transformer, -(-200_000 // len(transformer)))
    path = write_report(graph, tmp_path / "large.html", what_if=False, store=tmp_path / "none.db")
    assert path.stat().st_size < 12e6
    page.open(path, view="timeline")
    settle(page)
    keys(page, *["ArrowUp"] * 20, "n", on=".lanes")
    assert "runs" in page.run("return document.querySelector('.detail').innerText")
    for name in VIEWS:
        page.run(f"document.getElementById('tab-{name}').click()")
        settle(page)
    assert page.errors() == []
    assert page.requests() == []
