"""Functions named in strings, which child processes import, exist."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]
_NAMED = re.compile(r"\"((?:slipstream|slipstream_bench)(?:\.\w+)*):(\w+|\{\w+\})\"")


def _named() -> list[tuple[str, str]]:
    """Return pairs of module and function; braces mark names that are formatted at run time."""
    files = [*(_ROOT / "src").rglob("*.py"), *(_ROOT / "benchmarks").rglob("*.py")]
    found = {match for file in files for match in _NAMED.findall(file.read_text(encoding="utf-8"))}
    return sorted(found)


@pytest.mark.parametrize(("module", "name"), _named())
def test_a_function_named_for_a_child_exists(module: str, name: str) -> None:
    loaded = import_module(module)
    assert name.startswith("{") or callable(getattr(loaded, name))


def test_both_packages_name_some() -> None:
    assert {module.partition(".")[0] for module, _ in _named()} == {
        "slipstream",
        "slipstream_bench",
    }
