"""Where a data set lies on this machine: Debian's folder first, then ``$SLIPSTREAM_DATA``."""

from __future__ import annotations

import os
from pathlib import Path

from slipstream.data.catalogue import Entry
from slipstream.data.errors import MissingDataError

VARIABLE = "SLIPSTREAM_DATA"
# Where Debian's dataset-* packages put their files.
DEBIAN = Path("/usr/share/datasets")


def root() -> Path | None:
    """The folder ``$SLIPSTREAM_DATA`` names, or None where the variable is not set."""
    named = os.environ.get(VARIABLE, "")
    return Path(named) if named else None


def find(entry: Entry) -> Path:
    """The folder that holds all files of `entry`.

    Raises:
        MissingDataError: no place has it; names what to install or set.
    """
    places = _places(entry)
    for place in places:
        if place.is_dir() and all((place / file).is_file() for file in entry.files):
            return place
    raise MissingDataError(
        entry.name,
        f"data set '{entry.name}' is not on this machine",
        where=", ".join(_lacks(entry, place) for place in places) or f"${VARIABLE} is not set",
        remedy=_remedy(entry),
    )


def _places(entry: Entry) -> list[Path]:
    places = []
    if entry.package:
        places.append(DEBIAN / entry.package.removeprefix("dataset-"))
    folder = root()
    if folder is not None:
        places.append(folder / entry.folder)
    return places


def _lacks(entry: Entry, place: Path) -> str:
    if not place.is_dir():
        return f"no folder {place}"
    absent = [file for file in entry.files if not (place / file).is_file()]
    return f"{place} lacks {', '.join(absent)}"


def _remedy(entry: Entry) -> str:
    if entry.package:
        return f"apt-get install {entry.package}"
    what = f"{entry.folder}/ ({entry.source})"
    if root() is None:
        return f"set {VARIABLE} to the folder that holds {what}"
    return f"put {what} into ${VARIABLE}, or set it to the folder that holds it"
