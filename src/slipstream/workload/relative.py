"""Advice for relative imports in a file that runs outside its package."""

from __future__ import annotations

import ast
from pathlib import Path


def relative_import(path: Path) -> str | None:
    """Return a remedy for the first relative import in a file; None if it has none.

    A workload's file runs as with ``python file.py``, outside any package.
    """
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            package = path.resolve().parent
            for _ in range(node.level - 1):
                package = package.parent
            module = ".".join(filter(None, (package.name, node.module)))
            names = ", ".join(alias.name for alias in node.names)
            return (
                f"name the package in line {node.lineno}: from {module} import {names}, and put "
                f"PYTHONPATH={package.parent} before the command; or name a file outside of the "
                "package that imports the function"
            )
    return None
