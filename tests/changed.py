"""``pytest --changed``: only the tests that what changed since a commit can reach.

A test reaches what it imports, and what that imports, inside functions and for types, too. What
is found by its name at run time counts as well: a module named in a text (child processes are
started so), commands, techniques and benches behind their entry points. A change of anything but
Python, pages and kernels (the build, this file, ...) reaches every test.
"""

from __future__ import annotations

import ast
import re
import subprocess
import tomllib
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
_SOURCES = ("src", "benchmarks", "tests", "docs", "examples")
_NAMED = re.compile(r"\b(?:slipstream|slipstream_bench)(?:\.\w+)+")
# Files with these extensions are read only by tests of their folder.
_READ_BY = {"docs": "tests/docs", "page": "tests/report", "editors": "tests/live"}
_NOTHING = (".ci", ".gitignore", "LICENSE", "benchmarks/results")


def pytest_addoption(parser: pytest.Parser) -> None:
    """The option ``--changed``."""
    parser.addoption(
        "--changed", nargs="?", const="HEAD", metavar="COMMIT",
        help="run only tests affected by changes since COMMIT (HEAD: uncommitted changes)",
    )  # fmt: skip


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests that nothing changed can reach."""
    base = config.getoption("--changed")
    if base is None:
        return
    reached = reached_by(changed_files(base))
    chosen = [item for item in items if reached is None or item.path in reached]
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = chosen


def changed_files(base: str) -> list[str]:
    """Return root-relative paths of files that differ from `base`, and of untracked files."""
    commands = (["diff", "--name-only", base], ["ls-files", "--others", "--exclude-standard"])
    return [
        line
        for command in commands
        for line in subprocess.run(
            ["git", *command], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.splitlines()
    ]


def reached_by(files: Iterable[str]) -> set[Path] | None:
    """Return the test files that a change of `files` affects; None for all."""
    changed: set[Path] = set()
    tests: set[Path] = set()
    for name in files:
        path, first = ROOT / name, name.partition("/")[0]
        if name == "tests/conftest.py":
            return None
        if name.startswith(_NOTHING) or (first not in _SOURCES and path.suffix == ".md"):
            continue
        if path.suffix == ".py" and first in _SOURCES:
            changed.add(path)
        elif first in _READ_BY:
            tests |= set((ROOT / _READ_BY[first]).rglob("test_*.py"))
        elif first == "native":
            changed.add(ROOT / "src/slipstream/native/__init__.py")
        elif first == "src":
            changed.add(_nearest_package(path))
        elif first != "tests":
            return None
        else:
            tests |= set(path.parent.rglob("test_*.py"))
    return tests | {path for path in _reaching(changed) if path.name.startswith("test_")}


def _nearest_package(path: Path) -> Path:
    return next(
        folder / "__init__.py" for folder in path.parents if (folder / "__init__.py").exists()
    )


def _reaching(changed: set[Path]) -> set[Path]:
    """Return `changed` and every file that imports one of them, directly or indirectly."""
    importers: dict[Path, set[Path]] = {}
    for path, imported in imports().items():
        for module in imported:
            importers.setdefault(module, set()).add(path)
    found: set[Path] = set()
    waiting = [*changed]
    while waiting:
        path = waiting.pop()
        if path not in found:
            found.add(path)
            waiting += importers.get(path, ())
    return found


@cache
def imports() -> dict[Path, set[Path]]:
    """Return the files that every Python file imports or names."""
    modules = _modules()
    techniques = _entry_points("slipstream.techniques", modules)
    graph: dict[Path, set[Path]] = {}
    for path in {*modules.values(), *(p for s in _SOURCES for p in (ROOT / s).rglob("*.py"))}:
        tree = ast.parse(path.read_bytes())
        graph[path] = {
            file for name in _names(tree) if (file := _file_of(name, modules)) is not None
        }
        if path.is_relative_to(ROOT / "tests"):
            graph[path] |= {
                file for name in _texts(tree) for file in techniques.get(_head(name), ())
            }
            # The top conftest.py would connect every test to whatever its fixtures use.
            conftests = [
                folder / "conftest.py" for folder in path.parents if folder != ROOT / "tests"
            ]
            graph[path] |= {conftest for conftest in conftests if conftest.exists()}
    package = ROOT / "src/slipstream"
    # The package's __init__ imports lazily; `_names` resolves its names.
    graph[package / "__init__.py"] = set()
    graph[package / "cli/_main.py"] |= set((package / "cli").glob("*.py"))
    for path in (package / "verbs").rglob("*.py"):
        graph[path] |= {file for files in techniques.values() for file in files}
    return graph


def _modules() -> dict[str, Path]:
    """Return files by dotted name; those of `tests` by their last name, as pytest imports them."""
    found = {}
    for folder in ("src", "benchmarks"):
        for path in (ROOT / folder).rglob("*.py"):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found | {path.stem: path for path in (ROOT / "tests").rglob("*.py")}


def _entry_points(group: str, modules: dict[str, Path]) -> dict[str, set[Path]]:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["entry-points"]
    return {
        name: {modules[value.partition(":")[0]]} for name, value in listed.get(group, {}).items()
    }


def _names(tree: ast.AST) -> Iterator[str]:
    """Yield dotted names of modules or their members that the file imports or has in a string."""
    faces = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
            faces |= {
                alias.asname or alias.name for alias in node.names if alias.name == "slipstream"
            }
        elif isinstance(node, ast.ImportFrom) and node.module == "slipstream":
            yield from (_behind_the_face().get(alias.name, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id=name), attr=attribute) if name in faces:
                yield _behind_the_face().get(attribute, "slipstream")
    for text in _texts(tree):
        yield from _NAMED.findall(text)


@cache
def _behind_the_face() -> dict[str, str]:
    """Return the module of each name of ``import slipstream as ss``."""
    tree = ast.parse((ROOT / "src/slipstream/__init__.py").read_bytes())
    return {
        alias.name: f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }


def _texts(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def _head(text: str) -> str:
    """The technique's name in ``name:settings``."""
    return re.split(r"[:+ ]", text, maxsplit=1)[0]


def _file_of(name: str, modules: dict[str, Path]) -> Path | None:
    """Return the file of the longest prefix of a dotted name that is a module of the project."""
    while name:
        if name in modules:
            return modules[name]
        name = name.rpartition(".")[0]
    return None
