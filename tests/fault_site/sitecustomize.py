"""Loaded by every Python process that a trial of `mutants` starts: it puts the fault in there, too.

Nothing on disk is changed: the module's source is replaced as it is imported.
"""

from __future__ import annotations

import json
import os
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import find_spec
from typing import Any


class _Faulty(SourceFileLoader):
    """The module's own loader, but for its text."""

    text = ""

    def get_code(self, fullname: str) -> Any:
        """Compiled from the text with the fault; nothing is cached."""
        return compile(self.text, self.path, "exec", dont_inherit=True)


class _Finder(MetaPathFinder):
    def __init__(self, texts: dict[str, str]) -> None:
        self.texts = texts

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """The spec that all others find, with the faulty text."""
        if name not in self.texts:
            return None
        text = self.texts.pop(name)
        try:
            spec = find_spec(name)
        finally:
            self.texts[name] = text
        if spec is None or spec.origin is None:
            return spec
        loader = _Faulty(name, spec.origin)
        loader.text = text
        spec.loader = loader
        return spec


def install(path: str) -> None:
    """Replace the texts of modules by those in a JSON file: name -> source."""
    with open(path, encoding="utf-8") as file:
        sys.meta_path.insert(0, _Finder(json.load(file)))


if _PATH := os.environ.get("SLIPSTREAM_FAULT", ""):
    install(_PATH)
