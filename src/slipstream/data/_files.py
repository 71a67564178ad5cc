"""Files of a set: text in a named encoding, and compressed archives read as a stream.

Of an archive nothing is written to disk, and nothing outside is named.
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

# No file in the sets we read comes near this; an archive that claims more is not ours.
_MOST_MEMBER_BYTES = 64 << 20
_MOST_TOTAL_BYTES = 2 << 30


def check_positive(**limits: int | None) -> None:
    """Raises InvalidArgumentError for a number that is given and not positive."""
    for argument, limit in limits.items():
        if limit is not None and limit <= 0:
            raise InvalidArgumentError(argument, "must be positive")


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


def members(
    name: str, archive: Path, wanted: Callable[[PurePosixPath], bool] = lambda path: True
) -> Iterator[tuple[PurePosixPath, bytes]]:
    """The regular files of a tar archive (plain, gz or xz), in its order, as path and content.

    Args:
        name: the data set, for error messages.
        wanted: files for which it is false are skipped unread.

    Raises:
        CorruptDataError: damaged, or a member that is a link or device, has an absolute path or
            one with ``..``, or is larger than any file of ours.
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
                if total > _MOST_TOTAL_BYTES:
                    raise CorruptDataError(name, "unpacks to over 2 GiB", where=str(archive))
                if not wanted(path):
                    continue
                file = tar.extractfile(member)
                if file is not None:
                    yield path, file.read()
    except (tarfile.TarError, lzma.LZMAError, zlib.error, EOFError, OSError) as error:
        raise CorruptDataError(name, f"damaged archive: {error}", where=str(archive)) from error


def _check(name: str, archive: Path, member: tarfile.TarInfo, path: PurePosixPath) -> None:
    if not member.isreg():
        raise CorruptDataError(
            name, f"'{member.name}' in the archive is no regular file", where=str(archive)
        )
    if path.is_absolute() or ".." in path.parts or "\\" in member.name:
        raise CorruptDataError(
            name, f"'{member.name}' points outside the archive", where=str(archive)
        )
    if member.size > _MOST_MEMBER_BYTES:
        raise CorruptDataError(name, f"'{member.name}' is larger than 64 MiB", where=str(archive))
