"""Are the files here the ones that were recorded? Checksums against ``MANIFEST.json``."""

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
    """A line of ``MANIFEST.json``. `path` is relative to the data folder, with slashes."""

    path: str
    size_bytes: int
    sha256: str
    source: str
    licence: str


@dataclass(frozen=True)
class Verification:
    """What `verify` found.

    Attributes:
        files: how many files were compared with a recorded checksum.
        missing, changed: recorded files that are not there, or differ; paths in the data folder.
        note: why nothing was compared, where `files` is 0.
    """

    name: str
    files: int
    missing: tuple[str, ...]
    changed: tuple[str, ...]
    note: str = ""

    @property
    def ok(self) -> bool | None:
        """True, False, or None where there is no recorded checksum to compare with."""
        if self.missing or self.changed:
            return False
        return True if self.files else None


def recorded_files(name: str) -> tuple[RecordedFile, ...]:
    """What ``MANIFEST.json`` in ``$SLIPSTREAM_DATA`` records for a set; empty where it is silent.

    Raises:
        UnknownNameError: no such set.
        CorruptDataError: the manifest is not the JSON list we write, or a path leaves the folder.
    """
    known = entry(name)
    root = _find.root()
    if not known.folder or root is None or not (root / MANIFEST).is_file():
        return ()
    wanted = {f"{known.folder}/{file}" for file in known.files}
    return tuple(
        file
        for file in _read_manifest(root / MANIFEST)
        if (file.path in wanted if wanted else file.path.startswith(f"{known.folder}/"))
    )


def verify(name: str) -> Verification:
    """Compare each recorded file of a set with its sha256.

    Sets that Python, scikit-learn or Debian carry have no record of ours: their package managers
    check them, and `checksum` tells two of them apart.

    Raises:
        UnknownNameError: no such set.
        MissingDataError, MissingExtraError: the set is not on this machine.
        CorruptDataError: the manifest itself is damaged.
    """
    known = entry(name)
    absent = why_absent(name)
    recorded = recorded_files(name)
    root = _find.root()
    if absent is not None and not recorded:
        raise absent
    if root is None or not recorded:
        return Verification(name, 0, (), (), f"no checksums on record ({known.place})")
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
    """One sha256 over all files of a set as they are here, for records of an experiment.

    It is the digest of the lines ``SHA256  RELATIVE/PATH`` in order of path, so that it does not
    depend on where the files lie.

    Raises:
        UnknownNameError: no such set.
        MissingDataError, MissingExtraError: the set is not on this machine.
    """
    known = entry(name)
    absent = why_absent(name)
    if absent is not None:
        raise absent
    base, paths = _files(known)
    digest = hashlib.sha256()
    for path in sorted(paths):
        digest.update(f"{_sha256(path)}  {path.relative_to(base).as_posix()}\n".encode())
    return digest.hexdigest()


# The files behind each of scikit-learn's sets, inside the package.
_SKLEARN_FILES = {
    "digits": "datasets/data/digits.csv.gz",
    "china": "datasets/images/china.jpg",
    "flower": "datasets/images/flower.jpg",
    "breast_cancer": "datasets/data/breast_cancer.csv",
    "wine": "datasets/data/wine_data.csv",
    "iris": "datasets/data/iris.csv",
    "diabetes": "datasets/data/diabetes_data_raw.csv.gz",
}


def _files(known: Entry) -> tuple[Path, Iterable[Path]]:
    if known.name == "python_topics":
        topics = Path(str(importlib.import_module("pydoc_data.topics").__file__))
        return topics.parent, [topics]
    if known.place == "standard library":
        modules = stdlib_files()
        return Path(str(importlib.import_module("abc").__file__)).parent, modules
    if known.place == "scikit-learn":
        package = Path(str(importlib.import_module("sklearn").__file__)).parent
        return package, [package / _SKLEARN_FILES[known.name]]
    folder = _find.find(known)
    if known.files:
        return folder, [folder / file for file in known.files]
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
            raise CorruptDataError(MANIFEST, f"'{file.path}' leaves the folder", where=str(path))
    return files


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
