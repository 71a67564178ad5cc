"""Reading of text files and of compressed archives.

Archives are read as a stream, without writing to disk; members with outside paths are refused.
"""

from __future__ import annotations

import lzma
import tarfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

from slipstream.data.catalogue import Entry
from slipstream.data.errors import CorruptDataError
from slipstream.errors import InvalidArgumentError

# Far larger than any file of a data set; protects against archive bombs.
_MAX_MEMBER_BYTES = 64 << 20
_MAX_TOTAL_BYTES = 2 << 30


def check_positive(**limits: int | None) -> None:
    """Raise InvalidArgumentError for a limit that is neither None nor positive."""
    for argument, limit in limits.items():
        if limit is not None and limit <= 0:
            raise InvalidArgumentError(argument, f"{limit} is not positive")


def read_text(entry: Entry, path: Path, encoding: str = "utf-8") -> str:
    """Read a text file without translating line ends.

    Raises:
        CorruptDataError: the file cannot be read or decoded.
    """
    try:
        return path.read_bytes().decode(encoding)
    except (OSError, UnicodeDecodeError) as error:
        raise CorruptDataError(
            entry.name, f"not {encoding} text: {error}", where=str(path)
        ) from error


def read_lines(entry: Entry, path: Path, encoding: str = "utf-8") -> list[str]:
    """Read lines without their line ends and outer blanks; an empty last line is dropped.

    Lines end at newlines only, unlike in ``splitlines``, which splits at other characters too.

    Raises:
        CorruptDataError: the file cannot be read or decoded.
    """
    text = read_text(entry, path, encoding).removesuffix("\n")
    return [line.strip(" \t\r") for line in text.split("\n")]


def members(
    name: str, archive: Path, select: Callable[[PurePosixPath], bool] = lambda path: True
) -> Iterator[tuple[PurePosixPath, bytes]]:
    """Yield (path, content) of the regular files of a tar archive (plain, gz or xz), in its order.

    Args:
        name: name of the data set, for error messages.
        select: predicate of the files to read.

    Raises:
        CorruptDataError: the archive is damaged or unpacks to over 2 GiB, or a member is a link or
            device, has an absolute path or one with ``..``, or is larger than 64 MiB.
    """
    total = 0
    try:
        with tarfile.open(archive, mode="r|*") as tar:
            for member in tar:
                if member.isdir():
                    continue
                path = PurePosixPath(member.name)
                _check(name, archive, member, path)
                total += member.size
                if total > _MAX_TOTAL_BYTES:
                    raise CorruptDataError(name, "unpacks to over 2 GiB", where=str(archive))
                if not select(path):
                    continue
                file = tar.extractfile(member)
                if file is not None:
                    yield path, file.read()
    except (tarfile.TarError, lzma.LZMAError, zlib.error, EOFError, OSError) as error:
        raise CorruptDataError(name, f"damaged archive: {error}", where=str(archive)) from error


def _check(name: str, archive: Path, member: tarfile.TarInfo, path: PurePosixPath) -> None:
    if not member.isreg():
        raise CorruptDataError(
            name, f"'{member.name}' in the archive is not a regular file", where=str(archive)
        )
    if path.is_absolute() or ".." in path.parts or "\\" in member.name:
        raise CorruptDataError(
            name, f"'{member.name}' points outside the archive", where=str(archive)
        )
    if member.size > _MAX_MEMBER_BYTES:
        raise CorruptDataError(name, f"'{member.name}' is larger than 64 MiB", where=str(archive))
