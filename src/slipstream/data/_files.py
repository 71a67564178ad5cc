"""Text files read in a named encoding."""

from __future__ import annotations

from pathlib import Path

from slipstream.data.catalogue import Entry
from slipstream.data.errors import CorruptDataError


def read_text(entry: Entry, path: Path, encoding: str = "utf-8") -> str:
    """The file as it is: no end of line is translated.

    Raises:
        CorruptDataError: unreadable, or not in that encoding.
    """
    try:
        return path.read_bytes().decode(encoding)
    except (OSError, UnicodeDecodeError) as error:
        raise CorruptDataError(
            entry.name, f"no {encoding} text: {error}", where=str(path)
        ) from error


def read_lines(entry: Entry, path: Path, encoding: str = "utf-8") -> list[str]:
    """The lines without their ends and outer blanks; none is dropped but an empty last one.

    Split at newlines only: a line may hold a character that ``splitlines`` takes for its end.

    Raises:
        CorruptDataError: unreadable, or not in that encoding.
    """
    text = read_text(entry, path, encoding).removesuffix("\n")
    return [line.strip(" \t\r") for line in text.split("\n")]
