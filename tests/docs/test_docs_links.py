"""Links are valid; every page and card is reachable from the index."""

from __future__ import annotations

from pathlib import Path

import pytest
from pages import ROOT, anchors, links, pages


@pytest.mark.parametrize("page", pages())
def test_every_relative_link_is_valid(page: str) -> None:
    wrong = []
    for target in links(pages()[page]):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        path = (ROOT / page).parent / name if name else ROOT / page
        if not path.exists():
            wrong.append(f"{target}: there is no such file")
        elif anchor and anchor not in anchors(path.read_text("utf-8")):
            wrong.append(f"{target}: {path.name} has no such heading")
    assert wrong == []


def test_no_link_leaves_the_repository() -> None:
    outside = [
        (page, target)
        for page, text in pages().items()
        for target in links(text)
        if not ((ROOT / page).parent / target.partition("#")[0]).resolve().is_relative_to(ROOT)
    ]
    assert outside == []


def test_every_page_and_card_is_linked_from_the_index() -> None:
    linked = {
        (ROOT / "docs" / target).resolve()
        for page in ("docs/index.md", "docs/results.md")
        for target in links(pages()[page])
    }
    missing = [
        str(path.relative_to(ROOT))
        for path in sorted((ROOT / "docs").rglob("*.md"))
        if path.name != "index.md" and path not in linked
    ]
    assert missing == [], "add them to docs/index.md"


def test_the_checks_detect_errors() -> None:
    text = (
        "# A heading: `code`, twice\n\n[a](b.md#c) and `[not](a-link)`\n\n```\n[nor](this)\n```\n"
    )
    assert anchors(text) == {"a-heading-code-twice"}
    assert links(text) == ["b.md#c"]


def test_the_readme_starts_with_the_two_commands() -> None:
    text = Path(ROOT / "README.md").read_text("utf-8")
    first = text.split("```")[1].strip().splitlines()
    assert [line.split()[:2] for line in first] == [["make", "demo"], ["make", "test"]]
