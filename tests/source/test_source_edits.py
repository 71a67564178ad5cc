"""Edits preserve all other bytes, however the file is written."""

from __future__ import annotations

import ast
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.errors import WorkloadError
from slipstream.source import (
    AlreadyAppliedError,
    EditLocationError,
    Places,
    Source,
    accumulate,
    locate,
)

_PATH = Path("train.py")
# Edited lines are marked: O the optimizer's, F forward and loss, B backward, U update, L the loop.
_SCRIPT = """\
 #!/usr/bin/env python
 # {word}
 '''What {word} is: "trained"'''
 import torch  # {word}
 from torch.nn import functional as F
 @torch.no_grad()
 def look(x, unused = [1,2 ,3]):
 > return x   ;
 class Net(torch.nn.Linear): pass
 def main( ):
 > text = \"\"\"
{word}
  no indent here \\
    \"\"\"
M> model = Net(3,2)  # {word}
O> optimizer = torch.optim.SGD( model.parameters() ,lr = .1 )   # {word}
 > x, y = torch.randn(4, 3), torch.tensor([0, 1, 0, 1])
L> for epoch in range(2) :
 >> total = 1 + \\
 >>   2
F>> output = model( x )  # {word}
F
F>> # {word}
F>> loss = F.cross_entropy(output,
F  y, label_smoothing = {{'''
{word}
F>> ''': .0}}['''
{word}
F>> '''])
B>> loss.backward()
U>> optimizer.step()   # {word}
U>> optimizer.zero_grad()
 >> print(f"{{epoch}} {word}", loss.item() )
 > return text
 if __name__=='__main__': main()
"""


def fused(where: Places) -> Source:
    return where.set_optimizer(fused="True")


def autocast(where: Places) -> Source:
    return where.wrap_forward('with {torch}.autocast("cpu"):')


def compiled(where: Places) -> Source:
    return where.after_model("{model} = {torch}.compile({model})")


def threads(where: Places) -> Source:
    return where.at_top("{torch}.set_num_threads(4)")


def accumulated(where: Places) -> Source:
    return accumulate(where, 2)


EDITS: dict[Callable[[Places], Source], str] = {
    fused: "O", autocast: "F", compiled: "", threads: "", accumulated: "BU",
}  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(
    edit=st.sampled_from(list(EDITS)),
    newline=st.sampled_from(["\n", "\r\n", "\r"]),
    indent=st.sampled_from(["\t", "  ", "    ", " \t"]),
    encoding=st.sampled_from(["utf-8", "utf-8-sig", "latin-1"]),
    word=st.sampled_from(["plain", "größer", "naïve \t", "x\x0cy"]),
    ends=st.booleans(),
)
def test_unedited_bytes_are_preserved(
    edit: Callable[[Places], Source],
    newline: str,
    indent: str,
    encoding: str,
    word: str,
    ends: bool,
) -> None:
    marks, lines = [], []
    for line in _SCRIPT.format(word=word).split("\n")[:-1]:
        marked = line[:1] in {" ", *"MOLFBU"} and not line.startswith("  ")
        marks.append(line[0] if marked else " ")
        body = line[1:] if marked else line
        depth = len(body) - len(body.lstrip(">"))
        lines.append(indent * depth + body[depth:].removeprefix(" " if depth else ""))
    if encoding == "latin-1":
        lines[1] = f"# -*- coding: {encoding} -*- {word}"
    text = newline.join(lines) + (newline if ends else "")
    content = text.encode(encoding)
    source = Source.of(content, _PATH)
    assert source.text.encode(source.encoding) == content
    edited = edit(locate(source, None))
    new = edited.content
    compile(edited.text, "edited", "exec")
    assert new != content
    touched = EDITS[edit]
    untouched = [
        line.encode(encoding if encoding != "utf-8-sig" else "utf-8")
        for line, mark in zip(lines, marks, strict=True)
        if mark not in touched
    ]
    found = new.removeprefix(b"\xef\xbb\xbf").split(newline.encode())
    rest = iter(found)
    assert all(line in rest for line in untouched), "an unedited line is missing or moved"
    # Only the edit adds bytes.
    changed = len(lines) - len(untouched)
    assert len(found) - ends - len(untouched) <= changed + 2
    # Lines of the edit have the line endings of the file.
    assert new.count(b"\r\n") == (len(found) - 1 if newline == "\r\n" else 0)
    assert new.endswith(newline.encode()) == ends
    # Editing twice equals editing once.
    with pytest.raises((AlreadyAppliedError, EditLocationError)) as refused:
        edit(locate(Source.of(new, _PATH), None))
    assert refused.type is AlreadyAppliedError


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("ends", [True, False])
def test_git_applies_the_diff(tmp_path: Path, newline: str, ends: bool) -> None:
    text = "import torch\nmodel = torch.nn.Linear(1, 1)\nopt = torch.optim.SGD(model.parameters())"
    content = (text.replace("\n", newline) + newline * ends).encode()
    (tmp_path / "train.py").write_bytes(content)
    edited = fused(locate(Source.of(content, _PATH), None))
    subprocess.run(
        ["git", "apply", "--whitespace=nowarn", "-"],
        input=edited.diff().encode(),
        cwd=tmp_path,
        check=True,
    )
    assert (tmp_path / "train.py").read_bytes() == edited.content


def _call(text: str) -> tuple[Source, ast.Call]:
    source = Source.of(text.encode(), _PATH)
    return source, next(node for node in ast.walk(source.tree) if isinstance(node, ast.Call))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("f()", "f(a=1, b=2)"),
        ("f( )", "f( a=1, b=2)"),
        ("f(x)", "f(x, a=1, b=2)"),
        ("f(x, )", "f(x, a=1, b=2, )"),
        ("f((x))", "f((x), a=1, b=2)"),
        ("f(*x)", "f(*x, a=1, b=2)"),
        ("f(a=3)", "f(a=1, b=2)"),
        ("f(b=(3), a=4)", "f(b=(2), a=1)"),
        ("f(b=2)", "f(b=2, a=1)"),
        ("f(x for x in y)", "f((x for x in y), a=1, b=2)"),
        ("f(\n  x,\n  y\n)", "f(\n  x,\n  y,\n  a=1,\n  b=2\n)"),
        ("f(\n  x,\n  y,  # why\n)", "f(\n  x,\n  y,  # why\n  a=1,\n  b=2,\n)"),
        ("f(\n  x,\n  y  # why\n)", "f(\n  x,\n  y,  # why\n  a=1,\n  b=2\n)"),
        ("f(\n  x, y)", "f(\n  x, y, a=1, b=2)"),
        ("f(x, # é\n  'é')", "f(x, # é\n  'é', a=1, b=2)"),
    ],
)
def test_keywords_are_added_or_replaced(before: str, after: str) -> None:
    source, call = _call(before)
    assert source.set_keywords(call, a="1", b="2").text == after


def test_keywords_that_may_be_in_a_mapping_are_not_edited() -> None:
    source, call = _call("f(**settings)")
    with pytest.raises(EditLocationError, match=r"\*\*settings\b"):
        source.set_keywords(call, a="1")
    source, call = _call("f(a=2, **settings)")
    assert source.set_keywords(call, a="1").text == "f(a=1, **settings)"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("a = 1\nb = 2\n", "a = 1\nNEW\nb = 2\n"),
        ("a = 1", "a = 1\nNEW"),
        ("a = 1;\n", "a = 1;\nNEW\n"),
        ("a = 1; b = 2\n", "a = 1; NEW; b = 2\n"),
        ("if x: a = 1\n", "if x: a = 1; NEW\n"),
        ("if x:\n\ta = (1 +\n2)  # é\n\tb = 2\n", "if x:\n\ta = (1 +\n2)  # é\n\tNEW\n\tb = 2\n"),
        ("a = 1 \\\n\n\nb = 2", "a = 1 \\\n\nNEW\n\nb = 2"),
        ("a = '''\r\n;'''\r\n", "a = '''\r\n;'''\r\nNEW\r\n"),
    ],
)
def test_a_line_goes_after_a_statement(before: str, after: str) -> None:
    source = Source.of(before.encode(), _PATH)
    first = next(node for node in ast.walk(source.tree) if isinstance(node, ast.Assign))
    assert source.insert_after(first, "NEW").text == after


def test_a_line_goes_before_a_decorator() -> None:
    source = Source.of(b"x = 1\n@ f\ndef g(): pass\n", _PATH)
    assert source.insert_before(source.tree.body[1], "NEW").text == (
        "x = 1\nNEW\n@ f\ndef g(): pass\n"
    )


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", "import torch\n"),
        ("x = 1\n", "import torch\nx = 1\n"),
        ("import torch as th\n", "import torch as th\n"),
        ("import torch.nn\n", "import torch.nn\n"),
        (
            "# c\n'''Text.'''\nfrom __future__ import annotations\nimport os\n",
            "# c\n'''Text.'''\nfrom __future__ import annotations\nimport torch\nimport os\n",
        ),
        ("'''Text.'''\nx = 1\n", "'''Text.'''\nimport torch\nx = 1\n"),
        ("def f():\n  import torch\n", "import torch\ndef f():\n  import torch\n"),
    ],
)
def test_torch_is_imported_if_it_is_not(before: str, after: str) -> None:
    source = Source.of(before.encode(), _PATH)
    assert source.with_import("torch").text == after
    assert source.with_import("torch").with_import("torch").text == after


def test_a_rebound_name_is_left_alone() -> None:
    with pytest.raises(EditLocationError, match="'torch'"):
        Source.of(b"torch = 'lamp'\n", _PATH).with_import("torch")


def test_overlapping_edits_are_refused() -> None:
    source, call = _call("f(g(x))")
    both = source.replace(call, "h").replace(call.args[0], "k")
    with pytest.raises(EditLocationError, match="overlap"):
        _ = both.text


def test_a_result_with_a_syntax_error_is_refused() -> None:
    source, call = _call("f(x)")
    with pytest.raises(EditLocationError, match="not be valid Python"):
        source.replace(call, "f(").diff()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"def f(:\n", "cannot parse"),
        (b"# coding: nothing-known\n", "cannot parse"),
        (b"x = '\xff'\n", "cannot parse"),
        (b"x = 1\0\n", "cannot parse"),
    ],
)
def test_invalid_python_is_an_error_with_its_place(content: bytes, message: str) -> None:
    with pytest.raises(WorkloadError, match=message) as caught:
        Source.of(content, _PATH)
    assert str(caught.value.where).startswith("train.py")
