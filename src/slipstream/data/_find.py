"""Location of data sets on this machine: Debian's folder, then ``$SLIPSTREAM_DATA``."""

from __future__ import annotations

import os
from pathlib import Path

from slipstream.data.catalogue import Entry
from slipstream.data.errors import MissingDataError

VARIABLE = "SLIPSTREAM_DATA"
# Install folder of Debian's dataset-* packages.
DEBIAN = Path("/usr/share/datasets")


def root() -> Path | None:
    """Return the folder in ``$SLIPSTREAM_DATA``; None if the variable is unset or empty."""
    folder = os.environ.get(VARIABLE, "")
    return Path(folder) if folder else None


def find(entry: Entry) -> Path:
    """Return the folder that contains all files of `entry`.

    Raises:
        MissingDataError: no folder contains them; the error names what to install or set.
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
        return f"{place} is not a folder"
    absent = [file for file in entry.files if not (place / file).is_file()]
    return f"{place} lacks {', '.join(absent)}"


def _remedy(entry: Entry) -> str:
    if entry.package:
        return f"apt-get install {entry.package}"
    what = f"{entry.folder}/ ({entry.source})"
    if root() is None:
        return f"set {VARIABLE} to the folder that contains {what}"
    return f"put {what} into ${VARIABLE}, or set it to the folder that contains it"
