"""The command ``slipstream``: one file per command, none of which imports torch to show help."""

from __future__ import annotations

from slipstream.cli._main import main

__all__ = ["main"]
