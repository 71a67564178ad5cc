"""Verification of data files against the checksums in ``MANIFEST.json``."""

from __future__ import annotations

import hashlib
import importlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from slipstream.data import _find
from slipstream.data._access import why_absent
from slipstream.data._text import stdlib_files
from slipstream.data.catalogue import Entry, entry
from slipstream.data.errors import CorruptDataError

MANIFEST = "MANIFEST.json"


@dataclass(frozen=True)
class RecordedFile:
    """An entry of ``MANIFEST.json``; `path` is relative to the data folder, with slashes."""

    path: str
    size_bytes: int
    sha256: str
    source: str
    licence: str


@dataclass(frozen=True)
class Verification:
    """Result of `verify`.

    Attributes:
        files: number of files with a recorded checksum.
        missing, changed: paths of recorded files that are absent or differ, in the data folder.
        note: reason that no file was compared, if `files` is 0.
    """

    name: str
    files: int
    missing: tuple[str, ...]
    changed: tuple[str, ...]
    note: str = ""

    @property
    def ok(self) -> bool | None:
        """Whether all recorded files are present and unchanged; None without recorded checksums."""
        if self.missing or self.changed:
            return False
        return True if self.files else None


def recorded_files(name: str) -> tuple[RecordedFile, ...]:
    """Return the entries of a set in ``$SLIPSTREAM_DATA/MANIFEST.json``; may be empty.

    Raises:
        UnknownNameError: there is no data set with this name.
        CorruptDataError: the manifest is malformed, or a path leads outside the folder.
    """
    data_set = entry(name)
    root = _find.root()
    if not data_set.folder or root is None or not (root / MANIFEST).is_file():
        return ()
    paths = {f"{data_set.folder}/{file}" for file in data_set.files}
    return tuple(
        file
        for file in _read_manifest(root / MANIFEST)
        if (file.path in paths if paths else file.path.startswith(f"{data_set.folder}/"))
    )


def verify(name: str) -> Verification:
    """Compare each recorded file of a set with its sha256.

    Sets from Python, scikit-learn or Debian are not recorded, because their package managers verify
    them. To compare two copies of them, use `checksum`.

    Raises:
        UnknownNameError: there is no data set with this name.
        MissingDataError, MissingExtraError: the set is not on this machine.
        CorruptDataError: the manifest is damaged.
    """
    data_set = entry(name)
    absent = why_absent(name)
    recorded = recorded_files(name)
    root = _find.root()
    if absent is not None and not recorded:
        raise absent
    if root is None or not recorded:
        return Verification(name, 0, (), (), f"no checksums recorded ({data_set.place})")
    missing = []
    changed = []
    for file in recorded:
        path = root / file.path
        if not path.is_file():
            missing.append(file.path)
        elif path.stat().st_size != file.size_bytes or _sha256(path) != file.sha256:
            changed.append(file.path)
    return Verification(name, len(recorded), tuple(missing), tuple(changed))


def checksum(name: str) -> str:
    """Return one sha256 of all files of a set on this machine, to record with an experiment.

    It is the digest of the lines ``SHA256  RELATIVE/PATH``, sorted by path, and so independent of
    the location of the files.

    Raises:
        UnknownNameError: there is no data set with this name.
        MissingDataError, MissingExtraError: the set is not on this machine.
    """
    data_set = entry(name)
    absent = why_absent(name)
    if absent is not None:
        raise absent
    base, paths = _files(data_set)
    digest = hashlib.sha256()
    for path in sorted(paths):
        digest.update(f"{_sha256(path)}  {path.relative_to(base).as_posix()}\n".encode())
    return digest.hexdigest()


# Files of scikit-learn's data sets, relative to the package.
_SKLEARN_FILES = {
    "digits": "datasets/data/digits.csv.gz",
    "china": "datasets/images/china.jpg",
    "flower": "datasets/images/flower.jpg",
    "breast_cancer": "datasets/data/breast_cancer.csv",
    "wine": "datasets/data/wine_data.csv",
    "iris": "datasets/data/iris.csv",
    "diabetes": "datasets/data/diabetes_data_raw.csv.gz",
}


def _files(data_set: Entry) -> tuple[Path, Iterable[Path]]:
    if data_set.name == "python_topics":
        topics = Path(str(importlib.import_module("pydoc_data.topics").__file__))
        return topics.parent, [topics]
    if data_set.place == "standard library":
        modules = stdlib_files()
        return Path(str(importlib.import_module("abc").__file__)).parent, modules
    if data_set.place == "scikit-learn":
        package = Path(str(importlib.import_module("sklearn").__file__)).parent
        return package, [package / _SKLEARN_FILES[data_set.name]]
    folder = _find.find(data_set)
    if data_set.files:
        return folder, [folder / file for file in data_set.files]
    return folder, [path for path in folder.rglob("*") if path.is_file()]


def _read_manifest(path: Path) -> list[RecordedFile]:
    try:
        lines = json.loads(path.read_text(encoding="utf-8"))
        files = [
            RecordedFile(
                str(line["path"]), int(line["bytes"]), str(line["sha256"]),
                str(line["source"]), str(line["licence"]),
            )
            for line in lines
        ]  # fmt: skip
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CorruptDataError(
            MANIFEST, f"not a list of files: {error}", where=str(path)
        ) from error
    for file in files:
        inside = PurePosixPath(file.path)
        if inside.is_absolute() or ".." in inside.parts or "\\" in file.path:
            raise CorruptDataError(
                MANIFEST, f"'{file.path}' is outside the folder", where=str(path)
            )
    return files


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
