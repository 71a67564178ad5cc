"""The prose check: what it reads of a file, and allowances that only shrink."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import prose

WORD = "anew"
CODE = f'''\
"""Where it runs {WORD}."""  # it runs {WORD}, or `{WORD}`

def measure({WORD}: int) -> str:
    started = "it starts {WORD}"
    return "{WORD}"
'''
PAGE = f"""\
It starts {WORD}, `{WORD}` is code.
```
it starts {WORD} in a block
```
"""


def test_prose_names_and_openings_of_python() -> None:
    hits = [(line, match) for line, match, _ in prose.findings(CODE, ".py")]
    opening = f"Where it runs {WORD}."
    assert hits == [(1, opening), (1, WORD), (3, WORD), (4, WORD)]


def test_code_blocks_and_code_spans_of_markdown_are_skipped() -> None:
    assert [(line, match) for line, match, _ in prose.findings(PAGE, ".md")] == [(1, WORD)]


def test_a_marked_line_keeps_its_words() -> None:
    assert prose.findings(f'text = "it starts {WORD}"  # prose: keep', ".py") == []


def test_every_line_of_the_page_sources_is_read() -> None:
    assert prose.findings(f"const text = 'start {WORD}';", ".tsx")


@pytest.mark.parametrize(
    ("path", "package"),
    [
        ("src/slipstream/graph/io/file.py", "src/slipstream/graph"),
        ("src/slipstream/units.py", "src/slipstream"),
        ("tests/cli/test_cli_diff.py", "tests/cli"),
        ("docs/techniques/amp.md", "docs"),
        ("README.md", "README.md"),
    ],
)
def test_findings_are_counted_by_package(path: str, package: str) -> None:
    assert prose.package_of(path) == package


def test_an_allowance_fails_when_exceeded_and_only_shrinks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    allowed = tmp_path / "prose.json"
    monkeypatch.setattr(prose, "ROOT", tmp_path)
    monkeypatch.setattr(prose, "ALLOWED", allowed)
    monkeypatch.setattr(prose, "CHECKED", ("docs",))
    page = tmp_path / "docs" / "page.md"
    page.parent.mkdir()
    page.write_text(f"Start {WORD}.\n" * 2)
    allowed.write_text('{"docs": 3}')
    assert prose.main(["--update"]) == 0
    assert json.loads(allowed.read_text()) == {"docs": 2}
    page.write_text(f"Start {WORD}.\n" * 3)
    capsys.readouterr()
    assert prose.main(["--update", "--quiet"]) == 1
    assert json.loads(allowed.read_text()) == {"docs": 2}
    assert f"docs/page.md:3: '{WORD}'" in capsys.readouterr().out
