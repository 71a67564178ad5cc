"""Check wording: ``python tests/prose.py [PATH...]`` (default: everything that is checked).

Prints ``file:line: 'match' -> advice`` for each pattern of `prose.toml` in comments, docstrings,
strings, names, Markdown and the page's sources. It fails if a package has more findings than its
allowance in `prose.json`; ``--update`` lowers allowances to the present counts, and never raises
one. A line that must keep its words ends in ``# prose: keep``.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import sys
import tokenize
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ALLOWED = Path(__file__).with_suffix(".json")
CHECKED = (
    "src", "tests", "benchmarks", "docs", "examples", "page/src", "editors",
    "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "Makefile",
)  # fmt: skip
_SKIPPED = {"node_modules", "results", "assets", "__pycache__", "build", ".mypy_cache"}
_KEEP = "prose: keep"
# A finding: the line's number, the matched text and advice.
Finding = tuple[int, str, str]


class Rules:
    """Patterns of one table of `prose.toml`, tried together before each on its own."""

    def __init__(self, table: dict[str, list[str]], *, whole: bool = False) -> None:
        end = r"\Z" if whole else ""
        self._rules = [
            (re.compile(f"(?:{pattern}){end}"), advice)
            for advice, patterns in table.items()
            for pattern in patterns
        ]
        self._any = re.compile("|".join(f"(?:{rule.pattern})" for rule, _ in self._rules))

    def search(self, text: str) -> Iterator[tuple[str, str]]:
        """Yield each match and its advice."""
        if self._any.search(text):
            for pattern, advice in self._rules:
                yield from ((found[0].strip(), advice) for found in pattern.finditer(text))

    def match(self, text: str) -> Iterator[tuple[str, str]]:
        """Yield the beginning of `text`, and advice, for each pattern that it begins with."""
        if self._any.match(text):
            yield from ((text[:60], advice) for rule, advice in self._rules if rule.match(text))


_TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
PHRASES = Rules(_TABLES["phrases"])
NAMES = Rules(_TABLES["names"], whole=True)
OPENINGS = Rules(_TABLES["openings"])


def findings(text: str, suffix: str) -> list[Finding]:
    """Return the findings in a file's text, by line.

    Args:
        suffix: ``.py``, ``.md``, or another one, of a file whose every line is prose.

    Raises:
        SyntaxError: Python that cannot be parsed.
    """
    lines = _python_prose(text) if suffix == ".py" else _prose(text, fenced=suffix == ".md")
    found = {(at, *hit) for at, line in lines for hit in PHRASES.search(_without_code(line))}
    if suffix == ".py":
        found |= set(_names_and_openings(ast.parse(text)))
    marked = {at for at, line in enumerate(text.splitlines(), 1) if _KEEP in line}
    return sorted(finding for finding in found if finding[0] not in marked)


def _without_code(line: str) -> str:
    return re.sub(r"`+[^`]*`+", "`_`", line)


def _prose(text: str, *, fenced: bool) -> Iterator[tuple[int, str]]:
    """Yield numbered lines; with `fenced`, those outside code blocks."""
    inside = False
    for number, line in enumerate(text.splitlines(), 1):
        inside ^= fenced and line.lstrip().startswith("```")
        if not inside and not (fenced and line.startswith("    ")):
            yield number, line


def _python_prose(text: str) -> Iterator[tuple[int, str]]:
    """Yield numbered lines of comments and of strings that contain a space."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        kind = tokenize.tok_name[token.type]
        if kind in ("COMMENT", "STRING", "FSTRING_MIDDLE"):
            content = re.sub(r"^[rbfuRBFU]*(?:\"\"\"|'''|[\"'])", "", token.string)
            for offset, line in enumerate(content.split("\n")):
                if " " in line:
                    yield token.start[0] + offset, line


def _names_and_openings(tree: ast.Module) -> Iterator[Finding]:
    for node in ast.walk(tree):
        name = node.arg if isinstance(node, ast.arg) else getattr(node, "name", None)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            name = node.id
        if isinstance(name, str) and not isinstance(node, ast.alias):
            at = getattr(node, "lineno", 0)
            yield from ((at, *hit) for hit in NAMES.match(name))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = (ast.get_docstring(node) or "").partition("\n")[0]
            yield from ((node.body[0].lineno, *hit) for hit in OPENINGS.match(first))


def package_of(path: str) -> str:
    """Return the folder that shares an allowance, such as ``src/slipstream/graph`` or ``docs``."""
    parts = path.split("/")
    depth = {"src": 3, "tests": 2, "benchmarks": 2}.get(parts[0], 1)
    return "/".join(parts[: min(depth, max(len(parts) - 1, 1))])


def files_below(paths: Iterable[Path]) -> Iterator[Path]:
    """Yield the files that are checked: those named, and in folders those of known kinds."""
    for path in paths:
        if path.is_file():
            yield path
        for file in sorted(path.rglob("*")) if path.is_dir() else ():
            if file.suffix in (".py", ".md", ".ts", ".tsx") and not _SKIPPED & set(file.parts):
                yield file


def main(arguments: list[str] | None = None) -> int:
    """Print findings; return 1 if a package has more than its allowance."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("paths", nargs="*", type=Path)
    parser.add_argument("--quiet", action="store_true", help="print packages above their allowance")
    parser.add_argument("--update", action="store_true", help="lower allowances to the counts")
    options = parser.parse_args(arguments)
    allowed: dict[str, int] = json.loads(ALLOWED.read_text("utf-8")) if ALLOWED.exists() else {}
    listed: dict[str, list[str]] = {}
    for path in files_below(options.paths or [ROOT / name for name in CHECKED]):
        shown = path.resolve().relative_to(ROOT).as_posix()
        rows = listed.setdefault(package_of(shown), [])
        for at, match, advice in findings(path.read_text("utf-8"), path.suffix):
            rows.append(f"{shown}:{at}: {match!r} -> {advice}")
    counts = Counter({package: len(rows) for package, rows in listed.items()})
    above = {package for package, count in counts.items() if count > allowed.get(package, 0)}
    for package, rows in listed.items():
        if package in above or not options.quiet:
            print("\n".join(rows), end="\n" if rows else "")
    for package in sorted(above):
        print(f"{package}: {counts[package]} findings; {allowed.get(package, 0)} are allowed")
    if options.update and not options.paths:
        lower = {p: min(counts[p], most) for p, most in allowed.items() if counts[p]}
        ALLOWED.write_text(json.dumps(lower, indent=1, sort_keys=True) + "\n", "utf-8")
    return 1 if above else 0


if __name__ == "__main__":
    sys.exit(main())
