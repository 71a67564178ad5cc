"""Notes at the lines of a file, from made-up costs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from lsprotocol import types

from slipstream.live.analysis import Analysis
from slipstream.live.costs import Costs, LineCost, ModuleCost
from slipstream.live.editor import make_server
from slipstream.live.editor.answers import actions
from slipstream.live.editor.notes import History, make_notes, summary
from slipstream.live.editor.watch import Watch
from slipstream.workload import Workload

_TEXT = """class Block:
    def forward(self, x):
        return self.up(x)


def make_workload(batch_size=8):
    optimizer = torch.optim.Adam(model.parameters())
    return model, batch, None, optimizer
"""


def costs(path: str, scale: float = 1.0) -> Costs:
    """100 ms per step: 60 of them on line 3, 30 on line 7, 10 on none."""
    line = LineCost(
        path, 3, 20e6 * scale, 40e6 * scale, 0.0, 0.0, 3 << 20, 5, ("model.a",), "Block.forward",
        (("train.py:30", "train.py:40"),),
    )  # fmt: skip
    update = LineCost(path, 7, 0.0, 0.0, 30e6, 0.0, 0, 9)
    rest = LineCost("", 0, 0.0, 0.0, 0.0, 10e6, 1 << 20, 1)
    modules = tuple(
        ModuleCost(name, kind, file, "", 10e6, 20e6, 0.0, 0.0, 1 << 20)
        for name, kind, file in (
            ("model", "Sequential", ""), ("model.a", "Block", path), ("model.a.b", "Block", path),
            ("model.c", "Block", path),
        )
    )  # fmt: skip
    return Costs(40e6 + 60e6 * scale, 4 << 20, 8, (line, update), rest, 0.0, modules)


def test_a_class_has_the_cost_of_its_outermost_instances() -> None:
    notes = make_notes("/p/train.py", _TEXT, costs("/p/train.py"), History())
    titles = {note.line: note.title for note in notes.blocks}
    assert titles[0] == "60.0 % · 20.0 ms forward · 40.0 ms backward · 2.00 MiB · 2 instances"
    assert titles[1] == "60.0 % · 20.0 ms forward · 40.0 ms backward · 3.00 MiB"
    assert titles[5] == "30.0 % · 30.0 ms update"
    assert [note.line for note in notes.hints] == [2, 6]


def test_hovering_shows_callers_and_past_analyses() -> None:
    history = History()
    path = "/p/train.py"
    for scale in (1.0, 0.5, 2.0):
        history.add({path: _TEXT}, costs(path, scale))
    hint = make_notes(path, _TEXT, costs(path), history).hints[0]
    assert re.search(r"\btrain\.py:30\b.*\btrain\.py:40\b", hint.hover)
    assert "`▄▃█`" in hint.hover or "`▅▃█`" in hint.hover


def test_another_file_and_invalid_code_have_no_notes() -> None:
    assert make_notes("/p/other.py", _TEXT, costs("/p/train.py"), History()).blocks == ()
    assert make_notes("/p/train.py", "def (", costs("/p/train.py"), History()).blocks == ()


def test_formats_short_texts() -> None:
    assert summary(costs("")) == "100 ms per step · 8 samples · 80 samples/s · 4.00 MiB peak"


class Known:
    """An analyst whose results the test sets."""

    def __init__(self, path: Path) -> None:
        self.workload = Workload(f"{path}:make_workload")
        self.hear: Any = None

    def listen(self, listener: Any) -> Any:
        self.hear = listener
        return lambda: None

    def watch(self) -> None:
        """Nothing runs."""

    def close(self) -> None:
        """Nothing runs."""


def prediction(technique: str, ratio: float, **more: Any) -> dict[str, Any]:
    return {
        "technique": technique, "speedup": 1 / ratio, "numerics": "exact", "reason": None,
        "speedup_interval": [1 / (ratio * 1.1), 1 / (ratio * 0.9)], **more,
    }  # fmt: skip


def test_only_useful_advice_with_a_line_is_marked(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("import torch\n" + _TEXT)
    analyst, heard = Known(path), []
    watch = Watch(analyst, lambda: heard.append(1))  # type: ignore[arg-type]
    analyst.hear(Analysis(1, "a", "recorded", costs=costs(str(path))))
    advice = {
        "predictions": [
            prediction("fused_optimizer", 0.8),
            prediction("fused_optimizer+threads:2", 0.995),
            prediction("batch_size:x2", 0.625),
            prediction("batch_size:64", 0.5),
            prediction("compile", 0.1, why_not="no"),
        ]
    }
    analyst.hear(Analysis(1, "a", "ready", costs=watch.view.costs, advice=advice))
    first, other = sorted(watch.view.advice, key=lambda advice: -advice.line)
    assert (first.technique, first.line) == ("fused_optimizer", 7)
    assert (other.technique, other.line) == ("batch_size:x2", 6)
    assert first.said == "fused_optimizer is predicted 1.25x [1.14, 1.39]; numerics: exact"
    assert len(heard) == 2


def test_a_mark_offers_an_edit_of_its_own_text_version(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(text := "import torch\n" + _TEXT)
    analyst = Known(path)
    server = make_server(lambda target: analyst)  # type: ignore[arg-type, return-value]
    server.begin(f"{path}:make_workload")
    analyst.hear(Analysis(1, "a", "recorded", costs=costs(str(path))))
    advice = {"predictions": [prediction("fused_optimizer", 0.8)]}
    analyst.hear(Analysis(1, "a", "ready", advice=advice))
    python = types.LanguageKind.Python
    document = server.documents.open(types.TextDocumentItem(path.as_uri(), python, 5, text))
    (fix,) = actions(server, document, 7, 7)
    assert fix.title == "apply fused_optimizer: predicted 1.25x [1.14, 1.39]; numerics: exact"
    assert fix.kind == types.CodeActionKind.QuickFix
    (mark,) = fix.diagnostics or ()
    assert mark.range.start.line == 7
    assert fix.command is not None
    assert fix.command.arguments == [path.as_uri(), "fused_optimizer", 5]
    assert actions(server, document, 1, 5) == []
    other = text.replace("Adam(", "SGD(")
    document = server.documents.open(types.TextDocumentItem(path.as_uri(), python, 6, other))
    assert actions(server, document, 7, 7) == [], "its line has changed"


def test_notes_stay_and_are_marked_stale_during_a_newer_analysis(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(_TEXT)
    analyst = Known(path)
    watch = Watch(analyst, lambda: None)  # type: ignore[arg-type]
    first = Analysis(1, "a", "recorded", costs=costs(str(path)))
    analyst.hear(first)
    before = watch.view
    path.write_text("# newer\n" + _TEXT)
    analyst.hear(Analysis(2, "b", "recording", costs=first.costs, stale=True))
    assert watch.view.analysis.stale
    assert watch.view.notes is before.notes
    analyst.hear(Analysis(2, "b", "first", costs=costs(str(path))))
    assert not watch.view.analysis.stale
    assert watch.view.notes[str(path)].lines[0] == "# newer\n"
