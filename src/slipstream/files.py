"""Reading of untrusted files within limits, atomic writing, and temporary files."""

from __future__ import annotations

import fcntl
import gzip
import io
import os
import secrets
import shutil
import stat
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from slipstream.errors import SlipstreamError

if TYPE_CHECKING:
    from numpy.typing import NDArray

_GZIP = b"\x1f\x8b"
# A gzip file may expand to the larger of these bytes and this multiple of its own size. Traces of
# repeated steps, the most repetitive files we know, expand 30 times.
_EXPANDS_TO, _EXPANDS = 16 << 20, 100
# Default limit of a file that is read into memory as a whole.
LARGEST_BYTES = 1 << 30


@contextmanager
def opened(
    path: Path, error: type[SlipstreamError] = SlipstreamError, *, remedy: str | None = None
) -> Iterator[BinaryIO]:
    """Open the file at `path` for reading; a gzip file is decompressed as it is read.

    Args:
        error: raised instead of `OSError` and `MemoryError`, also for those of the block's body.
        remedy: of the error for a damaged file.

    Raises:
        SlipstreamError: of type `error`: the file does not exist, cannot be read, is damaged, or
            expands beyond the limits, or its contents do not fit into memory.
    """
    try:
        with open(path, "rb") as file:
            if stat.S_ISCHR(os.fstat(file.fileno()).st_mode):
                raise error("is a device, not a file", where=str(path))
            # Peek, since a pipe can be read only once.
            zipped = file.peek(2)[:2] == _GZIP
            yield io.BufferedReader(_Unzipped(file, path, error)) if zipped else file
    except FileNotFoundError:
        raise error(f"there is no file '{path}'", remedy="check the name") from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as damage:
        raise error(
            f"the gzip file is broken or cut off: {damage}", where=str(path), remedy=remedy
        ) from damage
    except OSError as refused:
        raise error(f"cannot be read: {refused.strerror or refused}", where=str(path)) from refused
    except MemoryError:
        raise error("its contents do not fit into memory", where=str(path)) from None


def read_bytes(
    path: Path,
    error: type[SlipstreamError] = SlipstreamError,
    *,
    most: int = LARGEST_BYTES,
    remedy: str | None = None,
) -> bytes:
    """Return the decompressed contents of `path`.

    Raises:
        SlipstreamError: as for `opened`, or there are more than `most` bytes.
    """
    with opened(path, error, remedy=remedy) as file:
        data = bytearray()
        while piece := file.read(1 << 20):
            data += piece
            if len(data) > most:
                raise error(f"has more than {most >> 20} MiB", where=str(path), remedy=remedy)
        return bytes(data)


def read_arrays(
    path: Path, error: type[SlipstreamError] = SlipstreamError
) -> dict[str, NDArray[Any]]:
    """Read the numeric arrays of an ``.npz`` file by name, or that of an ``.npy`` file as "".

    Raises:
        SlipstreamError: of type `error`: the file does not exist, is damaged, expands beyond the
            limits, or holds anything but numbers.
    """
    import numpy as np

    try:
        stored = np.load(path, allow_pickle=False)
        if isinstance(stored, np.ndarray):
            arrays = {"": stored}
        else:
            with stored:
                for info in stored.zip.infolist():
                    if info.file_size > max(_EXPANDS_TO, _EXPANDS * info.compress_size):
                        raise ValueError(f"{info.filename} expands more than {_EXPANDS} times")
                arrays = dict(stored)
    except OSError as refused:
        raise error(f"cannot be read: {refused.strerror or refused}", where=str(path)) from refused
    except Exception as damage:
        # NumPy, zipfile and decompressors raise a dozen types for damaged files.
        raise error(f"holds no NumPy arrays: {damage}", where=str(path)) from damage
    for name, array in arrays.items():
        if array.dtype.kind not in "biuf":
            what = f"array {name} " if name else ""
            raise error(f"{what}holds {array.dtype}, not numbers", where=str(path))
    return arrays


def read_array(
    path: Path, error: type[SlipstreamError] = SlipstreamError, ndim: int = 1
) -> NDArray[Any]:
    """Read the only array of an ``.npy`` or ``.npz`` file, or the one named ``x``.

    Args:
        ndim: minimum number of dimensions.

    Raises:
        SlipstreamError: of type `error`: as for `read_arrays`, or there is no such array.
    """
    arrays = read_arrays(path, error)
    array = arrays.get("x") if len(arrays) != 1 else next(iter(arrays.values()))
    if array is None:
        raise error(
            f"holds {len(arrays)} arrays, none of them named x", where=str(path),
            remedy="np.savez(file, x=...)",
        )  # fmt: skip
    if array.ndim < ndim:
        raise error(f"the array has {array.ndim} dimensions, not {ndim} or more", where=str(path))
    return array


def expanded(packed: bytes, most: int) -> bytes:
    """Decompress the output of `zlib.compress`.

    Raises:
        ValueError: `packed` is damaged, or expands to more than `most` bytes.
    """
    unzip = zlib.decompressobj()
    try:
        data = unzip.decompress(packed, most + 1)
    except zlib.error as damage:
        raise ValueError(str(damage)) from damage
    if len(data) > most or not unzip.eof:
        raise ValueError(f"truncated, or more than {most} bytes")
    return data


class _Unzipped(io.RawIOBase):
    """Decompressing reader of a gzip file that fails if it expands beyond the limits."""

    def __init__(self, file: BinaryIO, path: Path, error: type[SlipstreamError]) -> None:
        self._packed = _Counted(file)
        self._unzipped = gzip.GzipFile(fileobj=self._packed, mode="rb")
        self._path, self._error = path, error
        self._read_bytes = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: object) -> int:
        view = memoryview(buffer)  # type: ignore[arg-type]
        piece = self._unzipped.read(min(len(view), 1 << 20))
        view[: len(piece)] = piece
        self._read_bytes += len(piece)
        if self._read_bytes > max(_EXPANDS_TO, _EXPANDS * self._packed.taken):
            raise self._error(
                f"expands more than {_EXPANDS} times", where=str(self._path),
                remedy="unzip it first if that is right, and name the unzipped file",
            )  # fmt: skip
        return len(piece)


class _Counted(io.RawIOBase):
    """Reader that counts the bytes read from a file in `taken`."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.taken = file, 0

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        piece = self._file.read(size)
        self.taken += len(piece)
        return piece


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path that replaces `path` at the end, unless writing fails.

    Raises:
        OSError: no space is left, or permission is denied; `path` is unchanged.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(
    path: Path, text: str, what: str = "the file", remedy: str = "name another file"
) -> None:
    """Write `text` to `path` atomically.

    Args:
        what: name of the file in errors.
        remedy: of the error.

    Raises:
        SlipstreamError: the file cannot be written.
    """
    try:
        with replacing(path) as temporary:
            # File names in `text` may hold characters that UTF-8 cannot encode.
            temporary.write_text(text, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise SlipstreamError(
            f"{what} cannot be written: {error.strerror or error}", where=str(path), remedy=remedy
        ) from error


def temporary_path(kind: str, suffix: str = "") -> Path:
    """Return an unused path in the temporary folder, with this process's id in its name."""
    name = f"slipstream-{kind}-{os.getpid()}-{secrets.token_hex(8)}{suffix}"
    return Path(tempfile.gettempdir(), name)


def mark_in_use(fd: int) -> None:
    """Keep `leftovers` from returning an open file or folder while a copy of `fd` is open."""
    # On a file system without locks `leftovers` returns nothing.
    with suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_SH)


def make_folder_in_use(path: Path) -> int:
    """Create the folder `path`; return an open descriptor that marks it as in use."""
    while True:
        os.mkdir(path, 0o700)
        fd = os.open(path, os.O_RDONLY)
        mark_in_use(fd)
        # Another process may have removed it as a leftover before it was marked.
        if path.exists():
            return fd
        os.close(fd)


def leftovers(kind: str) -> Iterator[Path]:
    """Yield this user's temporary files and folders of `kind` that no running process uses.

    Each is locked until the next one is requested.
    """
    for path in Path(tempfile.gettempdir()).glob(f"slipstream-{kind}-[0-9]*-*"):
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            continue
        try:
            # Other users may create files of this name in a shared folder.
            if os.fstat(fd).st_uid == os.geteuid():
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # Another process may have removed it before it was locked.
                if path.exists():
                    yield path
        except OSError:
            continue
        finally:
            os.close(fd)


def remove_leftovers(kind: str) -> None:
    """Remove the `leftovers` of `kind`."""
    for path in leftovers(kind):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


@contextmanager
def temporary_folder(kind: str) -> Iterator[Path]:
    """Yield a temporary folder; a killed process's folder is removed by the next one."""
    remove_leftovers(kind)
    path, fd = temporary_path(kind), -1
    try:
        fd = make_folder_in_use(path)
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        if fd >= 0:
            os.close(fd)
