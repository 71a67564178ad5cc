"""The package of a workload's file."""

from __future__ import annotations

import ast
import sys
from pathlib import Path


def import_place(path: Path) -> tuple[Path, str]:
    """Return the folder from which a file is imported, and the name of its package.

    A file with relative imports runs as with ``python -m package.file`` in the folder of the
    outermost package; any other as with ``python file.py``: from its folder, without a package.
    """
    folder = path.resolve().parent
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return folder, ""
    levels = [node.level for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    names: list[str] = []
    while folder != folder.parent and (
        len(names) < max(levels, default=0) or (names and (folder / "__init__.py").exists())
    ):
        names.insert(0, folder.name)
        folder = folder.parent
    return folder, ".".join(names)


def extend_path(path: Path) -> str:
    """Make a file's imports possible; return the name of its package.

    Its own folder is searched last, for relative imports with a fallback: ``python file.py`` works,
    too.
    """
    folder, package = import_place(path)
    sys.path.insert(0, str(folder))
    if package:
        sys.path.append(str(path.resolve().parent))
    return package
