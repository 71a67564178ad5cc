"""The documentation as data: pages, anchors, links and commands."""

from __future__ import annotations

import itertools
import re
import shlex
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SPAN = re.compile(r"`([^`]+)`")
_LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
_SHELL = ("", "console", "sh")


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text and its first line."""

    language: str
    text: str
    line: int


@dataclass(frozen=True)
class Command:
    """A ``slipstream ...`` line of a page, split as a shell would.

    Attributes:
        output: what the page shows below it, if it does.
    """

    page: str
    text: str
    output: str = ""

    @property
    def arguments(self) -> list[str]:
        """Return the command line without the program's name."""
        return shlex.split(self.text, comments=True)[1:]

    def __str__(self) -> str:
        return f"{self.page}: {self.text}"


@cache
def pages() -> dict[str, str]:
    """Return every page for readers, by its path from the root."""
    found = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    found += sorted((ROOT / "docs").rglob("*.md")) + sorted((ROOT / "examples").rglob("*.md"))
    return {str(path.relative_to(ROOT)): path.read_text("utf-8") for path in found}


def blocks(text: str) -> list[Block]:
    """Return the fenced blocks of a page."""
    return [
        Block(match[1], match[2], text.count("\n", 0, match.start()) + 1)
        for match in _FENCE.finditer(text)
    ]


def prose(text: str) -> str:
    """Return a page without its fenced blocks."""
    return _FENCE.sub("", text)


def anchors(text: str) -> set[str]:
    """Return the anchors that links may name after ``#``: headings as GitHub writes them."""
    found = set()
    for heading in _HEADING.findall(prose(text)):
        plain = re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        found.add(re.sub(r"[^\w\- ]", "", plain).replace(" ", "-"))
    return found


def links(text: str) -> list[str]:
    """Return the targets of the page's links outside code."""
    return _LINK.findall(_SPAN.sub("`", re.sub(r"\[`([^`]+)`\]", r"[\1]", prose(text))))


def commands(page: str, text: str) -> list[Command]:
    """Commands in fenced blocks, with the output shown, and in code within the text.

    Within the text, what has an ellipsis or no argument is a name and not a command.
    """
    found = []
    for block in blocks(text):
        if block.language in _SHELL:
            found += _in_block(page, block.text)
    for span in _SPAN.findall(prose(text)):
        words = " ".join(span.split())
        if re.match(r"slipstream [a-z]+ [^\s-]", words) and "..." not in words:
            found.append(Command(page, words))
    return found


def _in_block(page: str, text: str) -> list[Command]:
    lines = text.replace("\\\n", " ").splitlines()
    starts = [n for n, line in enumerate(lines) if re.match(r"(\$ )?slipstream ", line)]
    found = []
    for start, end in itertools.pairwise([*starts, len(lines)]):
        shown = lines[start].startswith("$ ")
        output = "\n".join(lines[start + 1 : end]) if shown else ""
        found.append(Command(page, lines[start].removeprefix("$ "), output))
    return found


@cache
def all_commands() -> tuple[Command, ...]:
    """Return the commands of all pages and of the headers of the examples."""
    found = [command for page, text in pages().items() for command in commands(page, text)]
    for path in sorted((ROOT / "examples").glob("*.py")):
        header = path.read_text("utf-8").split('"""')[1]
        lines = re.findall(r"^    (slipstream .*)$", header, re.MULTILINE)
        found += [Command(str(path.relative_to(ROOT)), line) for line in lines]
    return tuple(found)
