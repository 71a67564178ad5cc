"""Imports that only a module of a package can make, in a file that is run by itself."""

from __future__ import annotations

import ast
from pathlib import Path


def relative_import(path: Path) -> str | None:
    """What to do about ``from .model import Net`` in a file; None where it has none such.

    A workload's file is run as ``python file.py`` would, so that it is in no package.
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
