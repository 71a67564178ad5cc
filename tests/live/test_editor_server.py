"""The language server, driven by a real client, over a real recording of a small model."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from editor_client import Editor, Session, started
from lsprotocol import types
from pygls.exceptions import JsonRpcException

_TRAIN = """
    import torch
    from torch import nn

    print("a user's own words")


    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = nn.Linear(256, 256)

        def forward(self, x):
            return torch.tanh(self.up(x))  # \U0001f600 up


    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(3))

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return x


    def make_workload(label="\U0001f600", batch_size: int = 32):
        model = Net()
        batch = torch.randn(batch_size, 256), torch.randn(batch_size, 256)
        optimizer = torch.optim.Adam(model.parameters())
        return model, batch, nn.functional.mse_loss, optimizer
"""


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    """A server that has analysed the model."""
    path = tmp_path_factory.mktemp("project") / "train.py"
    found = started(path, _TRAIN)
    assert found.do(found.editor.until_state("ready", "failed")) == "ready"
    yield found
    found.end()


@pytest.fixture
def editor(session: Session) -> Iterator[Editor]:
    """Restore the text after each test."""
    before = session.editor.text
    yield session.editor
    after = session.editor.text
    if after != before:
        lines = after.split("\n")
        last = len(lines[-1].encode("utf-16-le")) // 2
        whole = types.Range(types.Position(0, 0), types.Position(len(lines) - 1, last))
        session.editor.type(whole, before)


def test_classes_functions_and_the_step_have_a_lens(session: Session, editor: Editor) -> None:
    lenses = session.do(editor.lenses())
    (block,) = lenses[session.line("class Block")]
    assert " forward · " in block
    assert " backward · " in block
    assert block.endswith("3 instances")
    assert "%" in lenses[session.line("class Net")][0]
    assert any("32 samples" in title for title in lenses[session.line("def make_workload")])


def test_a_line_has_a_hint_at_its_end(session: Session, editor: Editor) -> None:
    hints = session.do(editor.hints())
    line = session.line("torch.tanh")
    text = editor.text.split("\n")[line]
    assert hints[line].position.character == len(text) + 1, "one character takes two units"
    assert "%" in str(hints[line].label)
    assert session.line("optim.Adam") in hints


def test_hovering_shows_the_parts(session: Session, editor: Editor) -> None:
    text = session.do(editor.hover(session.line("torch.tanh")))
    assert "| forward |" in text
    assert "| backward |" in text
    assert "`model.blocks.0.up`" in text
    assert f"train.py:{session.line('x = block(x)') + 1}" in text
    assert session.do(editor.hover(session.line("import torch"))) == ""


def test_notes_move_with_their_lines_during_typing(session: Session, editor: Editor) -> None:
    before = session.line("torch.tanh")
    editor.type(types.Range(types.Position(0, 0), types.Position(0, 0)), "# \U0001f600\n")
    hints = session.do(editor.hints())
    assert before + 1 in hints
    assert before not in hints


def test_a_changed_line_has_no_hint(session: Session, editor: Editor) -> None:
    line = session.line("torch.tanh")
    editor.type(types.Range(types.Position(line, 0), types.Position(line, 4)), "\t\t")
    hints = session.do(editor.hints())
    assert line not in hints
    assert session.line("optim.Adam") in hints


def test_a_batch_size_edit_is_undone_exactly(session: Session, editor: Editor) -> None:
    before = editor.text
    session.do(editor.run("slipstream.setBatchSize", editor.uri, 48, editor.version))
    assert editor.text == before.replace("batch_size: int = 32", "batch_size: int = 48")
    assert editor.labels[-1] == "slipstream: batch size 48"
    session.do(editor.run("slipstream.undo", editor.uri))
    assert editor.text.encode() == before.encode()


def test_sizes_are_offered_at_the_line_of_the_size(session: Session, editor: Editor) -> None:
    actions = session.do(editor.actions(session.line("def make_workload")))
    assert [action.title for action in actions] == [
        "batch size 16",
        "batch size 64",
        "batch size 128",
    ]
    assert actions[0].command is not None
    session.do(editor.run(actions[0].command.command, *actions[0].command.arguments or ()))
    assert "batch_size: int = 16" in editor.text
    assert session.do(editor.actions(session.line("import torch"))) == []


def test_a_technique_is_applied_to_unsaved_text(session: Session, editor: Editor) -> None:
    editor.type(types.Range(types.Position(0, 0), types.Position(0, 0)), "# \U0001f600 typed\n")
    before = editor.text
    session.do(editor.run("slipstream.apply", editor.uri, "fused_optimizer", editor.version))
    assert editor.text == before.replace("model.parameters())", "model.parameters(), fused=True)")
    session.do(editor.run("slipstream.undo", editor.uri))
    assert editor.text == before


def test_an_edit_for_another_version_is_refused(session: Session, editor: Editor) -> None:
    before, version = editor.text, editor.version
    with pytest.raises(JsonRpcException, match=f"at version {version}"):
        session.do(editor.run("slipstream.setBatchSize", editor.uri, 64, version - 1))
    assert editor.text == before


def test_an_editor_may_refuse_an_edit(session: Session, editor: Editor) -> None:
    before = editor.text
    editor.refuse = "the file is locked"
    try:
        with pytest.raises(JsonRpcException, match="the file is locked"):
            session.do(editor.run("slipstream.setBatchSize", editor.uri, 64))
    finally:
        editor.refuse = None
    assert editor.text == before


def test_undo_is_refused_after_further_typing(session: Session, editor: Editor) -> None:
    session.do(editor.run("slipstream.setBatchSize", editor.uri, 64))
    editor.type(types.Range(types.Position(0, 0), types.Position(0, 0)), "#\n")
    typed = editor.text
    with pytest.raises(JsonRpcException, match="changed since"):
        session.do(editor.run("slipstream.undo", editor.uri))
    assert editor.text == typed
    editor.type(types.Range(types.Position(0, 0), types.Position(1, 0)), "")
    session.do(editor.run("slipstream.undo", editor.uri))


@pytest.mark.parametrize(
    ("command", "arguments", "reason"),
    [
        ("slipstream.apply", ["no_such_technique"], "no_such_technique"),
        ("slipstream.apply", ["batch_size:64"], "does not define"),
        ("slipstream.setBatchSize", [0], "between 1"),
        ("slipstream.setBatchSize", ["many"], "many"),
        ("slipstream.setBatchSize", [], "Expected"),
    ],
)
def test_an_impossible_command_gets_an_answer(
    session: Session, editor: Editor, command: str, arguments: list[Any], reason: str
) -> None:
    before = editor.text
    with pytest.raises(JsonRpcException, match=reason):
        session.do(editor.run(command, editor.uri, *arguments))
    assert editor.text == before


def test_a_cancelled_edit_is_not_made(session: Session, editor: Editor) -> None:
    # On a long text an edit takes longer than the cancellation.
    beginning = types.Position(0, 0)
    editor.type(types.Range(beginning, beginning), "numbers = [0, 1, 2]\n" * 1000)
    before, n_labels = editor.text, len(editor.labels)

    async def cancel() -> None:
        protocol = editor.client.protocol
        params = types.ExecuteCommandParams("slipstream.apply", [editor.uri, "fused_optimizer"])
        future = protocol.send_request("workspace/executeCommand", params)
        (number,) = (k for k, pending in protocol._request_futures.items() if pending is future)
        protocol.notify("$/cancelRequest", types.CancelParams(number))
        with pytest.raises(JsonRpcException, match=r"[Cc]ancel"):
            await asyncio.wrap_future(future)
        await editor.state()

    session.do(cancel())
    assert editor.text == before
    assert len(editor.labels) == n_labels


def test_a_syntax_error_is_marked_during_typing_and_cleared(
    session: Session, editor: Editor
) -> None:
    line = session.line("class Net")
    end = types.Range(types.Position(line, 0), types.Position(line, 0))
    editor.type(end, "def (\n")

    def marks() -> list[types.Diagnostic]:
        return editor.diagnostics.get(editor.uri, [])

    session.do(editor.until(lambda: bool(marks())))
    (mark,) = marks()
    assert mark.range.start.line == line
    assert mark.severity == types.DiagnosticSeverity.Error
    assert session.do(editor.hints()), "earlier hints stay"
    with pytest.raises(JsonRpcException, match="parse"):
        session.do(editor.run("slipstream.setBatchSize", editor.uri, 64))
    editor.type(types.Range(types.Position(line, 0), types.Position(line + 1, 0)), "")
    session.do(editor.until(lambda: not marks()))


def test_user_errors_are_marked_at_their_lines(session: Session, editor: Editor) -> None:
    """The corrected text is analysed again: the server stays up."""
    clean = editor.text
    line = session.line("x = block(x)")
    end = types.Range(types.Position(line, 0), types.Position(line, 0))
    editor.type(end, "            raise RuntimeError('no such block')\n")
    editor.save()
    session.do(
        editor.until(
            lambda: any(
                "no such block" in mark.message and mark.range.start.line == line
                for mark in editor.diagnostics.get(editor.uri, [])
            )
        )
    )
    assert session.do(editor.state()) == "failed"
    stale = session.do(editor.lenses())
    assert any(title.startswith("… ") for titles in stale.values() for title in titles)
    editor.type(types.Range(types.Position(line, 0), types.Position(line + 1, 0)), "")
    assert editor.text == clean
    editor.save()
    session.do(editor.until(lambda: not editor.diagnostics.get(editor.uri)))
    # Its state is that of the failure until the next analysis begins.
    session.do(editor.until_state("ready"))


def test_an_endless_loop_and_a_missing_function_are_marked(tmp_path: Path) -> None:
    text = """
        import time

        def make_workload():
            while True:
                time.sleep(0.1)
    """
    session = started(tmp_path / "endless.py", text, "--timeout", "3s")
    editor = session.editor
    session.do(editor.until(lambda: bool(editor.diagnostics.get(editor.uri))))
    (mark,) = editor.diagnostics[editor.uri]
    assert mark.severity == types.DiagnosticSeverity.Error
    assert session.do(editor.hover(0)) == ""
    line = session.line("def make_workload")
    where = types.Range(types.Position(line, 4), types.Position(line, 17))
    editor.type(where, "something")
    editor.save()
    session.do(
        editor.until(
            lambda: any(
                "make_workload" in diagnostic.message
                for diagnostic in editor.diagnostics.get(editor.uri, [])
            )
        )
    )
    session.end()


def test_nothing_runs_without_a_request(tmp_path: Path) -> None:
    """A folder of unknown origin may be opened."""
    path = tmp_path / "train.py"
    session = Session(path, _TRAIN)
    editor = session.editor
    session.do(editor.start())
    editor.open()
    lenses = session.do(editor.lenses())
    line = session.line("def make_workload")
    (title,) = lenses.pop(line)
    assert re.search(r"\banalyse\b.*\bstep\b", title)
    assert not lenses
    assert session.do(editor.state()) == ""
    assert session.do(editor.hints()) == {}
    with pytest.raises(JsonRpcException, match="no workload"):
        session.do(editor.run("slipstream.setBatchSize", editor.uri, 64))
    assert session.do(editor.run("slipstream.analyse", f"{tmp_path}/none.py:f")) is False
    session.do(editor.until(lambda: bool(editor.messages)))
    assert "none.py" in editor.messages[0]
    session.end()
