"""Write a file whole or not at all."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from slipstream.errors import SlipstreamError


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path beside `path` to write to; it takes the place of `path` unless writing fails.

    Raises:
        OSError: there is no room, or no right to write there; `path` is as it was.
    """
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        yield beside
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def write_text(
    path: Path, text: str, what: str = "the file", remedy: str = "name another file"
) -> None:
    """Write `text` into `path`, whole or not at all.

    Args:
        what, remedy: what cannot be written, where it cannot, and what helps.

    Raises:
        SlipstreamError: it cannot be written.
    """
    try:
        with replacing(path) as beside:
            beside.write_text(text, encoding="utf-8")
    except OSError as error:
        raise SlipstreamError(
            f"{what} cannot be written: {error.strerror or error}", where=str(path), remedy=remedy
        ) from error
