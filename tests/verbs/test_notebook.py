"""Tests of HTML representations in notebooks, which contain no scripts."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest

from known_clock import KnownClock
from slipstream.graph import find_critical_path, replay
from slipstream.measure import compare
from slipstream.technique import Quality, QualityKind
from slipstream.units import format_duration
from slipstream.verbs.advising import Advice
from slipstream.verbs.predicting import predict
from slipstream.verbs.results import Predicted, Refused
from tiny_models import captured


class _Read(HTMLParser):
    """Tags and texts of an HTML fragment with balanced elements."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.open: list[str] = []
        self.texts: list[str] = []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)
        self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_a_graph_shows_its_costliest_operators() -> None:
    graph = captured("transformer")
    path = find_critical_path(replay(graph))
    first = max(path.by("operator"), key=lambda group: group.busy_ns)
    read = _Read(graph._repr_html_())
    assert "script" not in read.tags
    assert first.name.removeprefix("aten::") in read.texts
    assert format_duration(first.busy_ns) in read.texts
    assert any(format_duration(path.step_ns) in text for text in read.texts)


def test_names_are_escaped() -> None:
    graph = captured("transformer")
    named = replace(graph, meta={**graph.meta, "workload": "<script>alert(1)</script>"})
    read = _Read(named._repr_html_())
    assert "script" not in read.tags
    assert "<script>alert(1)</script>" in read.texts


def test_a_prediction_draws_its_interval() -> None:
    (found,) = predict(captured("transformer"), [()])
    read = _Read(found._repr_html_())
    assert {"table", "svg", "circle"} <= {*read.tags}
    assert f"{found.speedup:.2f}x" in read.texts
    assert found.verdict.text in read.texts


def test_a_refusal_shows_its_reason() -> None:
    quality = Quality(QualityKind.EXACT, "")
    found = Refused("tf32", 1.0, "no GPU here", quality)
    assert "no GPU here" in _Read(found._repr_html_()).texts


def test_advice_is_a_table_with_stars_and_reasons() -> None:
    (found,) = predict(captured("transformer"), [()])
    assert isinstance(found, Predicted)
    refused = Refused("tf32", 1.0, "no GPU here")
    advice = Advice((found, refused), front=frozenset({found.technique}), best=None)
    read = _Read(advice._repr_html_())
    assert {"table", "svg", "circle"} <= {*read.tags}
    assert f"{found.technique} *" in read.texts
    assert re.search(r"\btf32\b.*\bnot\b.*\bno\b.*\bGPU\b", " ".join(read.texts))
    assert "first choice" not in " ".join(read.texts)
    best = replace(advice, best=found)
    assert f"first choice: {found.technique}" in " ".join(_Read(best._repr_html_()).texts)


def test_a_comparison_has_its_own_css_scope(clock: KnownClock) -> None:
    found = compare({"as it is": lambda: clock.work(2e6), "half": lambda: clock.work(1e6)})
    html = found._repr_html_()
    read = _Read(html)
    assert html.startswith('<div class="slipstream">')
    assert "script" not in read.tags
    assert {"table", "svg"} <= {*read.tags}
    assert any("half" in text for text in read.texts)
    with pytest.raises(AssertionError):
        _Read("<div><p></div>")
