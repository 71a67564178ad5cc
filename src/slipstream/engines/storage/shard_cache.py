"""A cache of files on a fast disk for training jobs that read them from a slow origin."""

from __future__ import annotations

import hashlib
import io
import json
import os
import secrets
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Generic, TypeVar
from urllib.parse import quote, unquote_to_bytes

from slipstream.engines.storage.policies import CachePolicy
from slipstream.engines.storage.predictor import AccessPredictor
from slipstream.engines.storage.tokens import ContextClasses
from slipstream.errors import InvalidArgumentError, MissingExtraError, SlipstreamError
from slipstream.files import replacing
from slipstream.units import parse_bytes

if TYPE_CHECKING:
    from torch.utils.data import Dataset
else:
    # A DataLoader requires no base class at run time, and importing torch takes seconds.
    Dataset = Generic

_T = TypeVar("_T")
_SUFFIX = ".cached"
# First bytes of answers to other processes.
_CONTENT, _ERROR = b"+", b"-"
# Longest name of a file on common file systems, less what a temporary name adds.
_MAX_NAME = 200


@dataclass(frozen=True)
class CacheCounts:
    """Counts since a cache was opened.

    Attributes:
        hits: reads from the fast disk.
        origin_bytes, origin_ns: read from the origin, and the time of these reads.
        disk_errors: files that could not be read from, or written to, the fast disk.
    """

    reads: int = 0
    hits: int = 0
    bytes: int = 0
    origin_bytes: int = 0
    origin_ns: int = 0
    disk_errors: int = 0

    @property
    def hit_rate(self) -> float:
        return self.hits / self.reads if self.reads else 0.0


class ShardCache:
    """Read files from an origin, and keep those in a folder that will be read again soonest.

    The policy is the one that `simulate` predicts with. Files must not change at the origin.
    If the fast disk fails or is full, files are read from the origin. Threads may share a cache;
    other processes, such as workers of a DataLoader, read through the one that created it, and so
    do copies; the original has the counts and the policy.

    Args:
        folder: on the fast disk; what an earlier cache left there is used.
        capacity: bytes, such as ``200GB``.
        origin: a folder, a URL that fsspec can open, or a function from a name to its bytes.
        policy: see `POLICIES`.
        context: context of every read of this job, such as ``{"job": "pretraining"}``.
        by_bytes: see `CachePolicy`.
        predictor: fitted to a trace of an earlier run; what to expect before anything was read.

    Raises:
        InvalidArgumentError: the capacity is malformed.
        SlipstreamError: the folder cannot be created, or fsspec cannot open the URL.
    """

    def __init__(
        self,
        folder: str | Path,
        capacity: int | str,
        origin: str | Path | Callable[[str], bytes],
        *,
        policy: str = "auto",
        context: Mapping[str, str] | None = None,
        by_bytes: bool = False,
        predictor: AccessPredictor | None = None,
    ) -> None:
        size = parse_bytes(capacity, "capacity") if isinstance(capacity, str) else capacity
        if policy == "belady":
            raise InvalidArgumentError(
                "policy", "belady knows the future, which a running cache does not",
                remedy="policy='auto'",
            )  # fmt: skip
        self._policy = CachePolicy(policy, size, by_bytes=by_bytes)
        self._folder = Path(folder)
        self._fetch = origin if callable(origin) else _origin(str(origin))
        self._context = dict(context or {})
        self._classes, self._lock, self._pid = ContextClasses(), threading.Lock(), os.getpid()
        self._predictor = predictor
        # A file of another size is another object, since a policy's objects keep their size.
        self._numbers: dict[tuple[str, int], int] = {}
        self._names: list[str] = []
        self._stored: set[str] = set()
        self.counts = CacheCounts()
        self._address, self._key, self._links = "", secrets.token_bytes(32), threading.local()
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._adopt()
            self._listen()
        except OSError as error:
            raise SlipstreamError(
                f"the cache folder cannot be used: {error.strerror or error}", where=str(folder),
                remedy="name a folder that you may write to, and a short TMPDIR for the socket",
            ) from error  # fmt: skip

    @property
    def policy(self) -> str:
        """The policy that decides at present."""
        return self._policy.followed

    def read(self, name: str | Path, context: Mapping[str, str] | None = None) -> bytes:
        """Return the bytes of a file.

        Args:
            context: context of this read, in addition to that of the cache.

        Raises:
            SlipstreamError: the origin fails, or the process that created the cache has ended.
        """
        name = str(name)
        if os.getpid() != self._pid:
            return self._read_in_owner(name, context)
        content = self._read_stored(name)
        hit = content is not None
        start_ns = time.perf_counter_ns()
        if content is None:
            content = self._read_origin(name)
        elapsed_ns = time.perf_counter_ns() - start_ns
        missed = {} if hit else {"origin_bytes": len(content), "origin_ns": elapsed_ns}
        with self._lock:
            self._count(reads=1, hits=hit, bytes=len(content), **missed)
            keep = self._keep(name, len(content), {**self._context, **(context or {})})
            if keep and name not in self._stored:
                try:
                    with replacing(self._path(name)) as temporary:
                        temporary.write_bytes(content)
                    self._stored.add(name)
                except OSError:
                    self._count(disk_errors=1)
        return content

    def open(self, name: str | Path) -> BinaryIO:
        """Return a file with the bytes that `read` returns; it stays readable when evicted."""
        name = str(name)
        content = self.read(name)
        try:
            if name in self._stored and os.getpid() == self._pid:
                return self._path(name).open("rb")
            # A real file, since some decoders need its number.
            file = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115
            file.write(content)
            file.seek(0)
        except OSError:
            return io.BytesIO(content)
        return file

    def __getstate__(self) -> dict[str, Any]:
        # A copy reads through this cache: no process that creates one has number 0.
        shared = ("_folder", "_address", "_key", "counts")
        return {key: vars(self)[key] for key in shared} | {"_stored": set(), "_pid": 0}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _links=threading.local())

    def _listen(self) -> None:
        """Answer other processes in a thread, until the cache is collected."""
        listener = Listener(None, "AF_UNIX", authkey=self._key)
        self._address = str(listener.address)
        threading.Thread(
            target=_accept, args=(weakref.ref(self), listener), daemon=True, name="ShardCache"
        ).start()
        weakref.finalize(self, listener.close)

    def _read_in_owner(self, name: str, context: Mapping[str, str] | None) -> bytes:
        pid, link = getattr(self._links, "opened", (0, None))
        try:
            if pid != os.getpid() or link is None:
                link = Client(self._address, "AF_UNIX", authkey=self._key)
                self._links.opened = os.getpid(), link
            link.send_bytes(json.dumps([name, dict(context or {})]).encode())
            answer: bytes = link.recv_bytes()
        except (OSError, EOFError, AuthenticationError) as error:
            raise SlipstreamError(
                "the process that created the ShardCache does not answer", where=name,
                remedy="keep that process and its ShardCache alive while workers read",
            ) from error  # fmt: skip
        if answer[:1] == _ERROR:
            what, where, remedy = json.loads(answer[1:])
            raise SlipstreamError(what, where=where, remedy=remedy)
        return answer[1:]

    def _keep(self, name: str, size: int, context: Mapping[str, str]) -> bool:
        """Let the policy see a read, and remove what it evicts; return whether to keep the file."""
        number = self._numbers.setdefault((name, size), len(self._names))
        if number == len(self._names):
            self._names.append(name)
        classes = len(self._classes.tokens)
        class_ = self._classes.number((*sorted(context.items()), ("object", name)))
        if class_ == classes and self._predictor is not None:
            self._predictor.set_prior(self._policy, class_, self._classes.tokens[class_])
        _, keep = self._policy.request(number, size, class_)
        for evicted in self._policy.evicted():
            if evicted != number:
                self._remove(self._names[evicted])
        if not keep and name in self._stored:
            self._remove(name)
        return keep

    def _path(self, name: str) -> Path:
        # Percent-encoded, so that the folder lists what it holds; ":" cannot be part of a quoted
        # name and marks a digest.
        text = quote(os.fsencode(name), safe="")
        if len(text) > _MAX_NAME:
            text = ":" + hashlib.sha256(os.fsencode(name)).hexdigest()
        return self._folder / (text + _SUFFIX)

    def _adopt(self) -> None:
        """Take over the files that an earlier cache left, the least recently written first."""
        # The name of a digest is unknown, and a process that was killed leaves what it was writing.
        for pattern in (":*" + _SUFFIX, f".*{_SUFFIX}.*"):
            for path in self._folder.glob(pattern):
                path.unlink(missing_ok=True)
        found = [(path.stat(), path) for path in self._folder.glob("*" + _SUFFIX)]
        for status, path in sorted(found, key=lambda entry: entry[0].st_mtime_ns):
            name = os.fsdecode(unquote_to_bytes(path.name.removesuffix(_SUFFIX)))
            self._stored.add(name)
            self._keep(name, status.st_size, self._context)

    def _remove(self, name: str) -> None:
        self._stored.discard(name)
        try:
            self._path(name).unlink(missing_ok=True)
        except OSError:
            self._count(disk_errors=1)

    def _read_stored(self, name: str) -> bytes | None:
        if name not in self._stored:
            return None
        try:
            return self._path(name).read_bytes()
        except OSError as error:
            with self._lock:
                self._stored.discard(name)
                # Another thread may just have evicted it.
                if not isinstance(error, FileNotFoundError):
                    self._count(disk_errors=1)
            return None

    def _count(self, **added: int) -> None:
        now = vars(self.counts)
        self.counts = replace(self.counts, **{key: now[key] + n for key, n in added.items()})

    def _read_origin(self, name: str) -> bytes:
        try:
            return bytes(self._fetch(name))
        except SlipstreamError:
            raise
        except Exception as error:  # an fsspec file system raises errors of its own
            raise SlipstreamError(
                f"the origin cannot be read: {type(error).__name__}: {error}", where=name,
                remedy="check the name and the origin; files in the cache can still be read",
            ) from error  # fmt: skip


def _accept(cache: weakref.ref[ShardCache], listener: Listener) -> None:
    while True:
        try:
            link = listener.accept()
        except (AuthenticationError, EOFError):
            continue
        except OSError:  # closed
            return
        threading.Thread(target=_answer, args=(cache, link), daemon=True).start()


def _answer(cache: weakref.ref[ShardCache], link: Connection) -> None:
    """Read for another process until it closes the connection."""
    with link, suppress(EOFError, OSError):
        while True:
            name, context = json.loads(link.recv_bytes())
            owner = cache()
            if owner is None:
                return
            try:
                answer = _CONTENT + owner.read(name, context)
            except SlipstreamError as error:
                parts = [error.what, error.where, error.remedy]
                answer = _ERROR + json.dumps(parts).encode()
            link.send_bytes(answer)
            del owner


def _origin(place: str) -> Callable[[str], bytes]:
    """Return a function that reads a file below a folder or a URL."""
    if "://" not in place:
        return lambda name: Path(place, name).read_bytes()
    try:
        from fsspec.core import url_to_fs
    except ImportError:
        raise MissingExtraError(f"the origin {place}", "fsspec", "storage") from None
    try:
        system, root = url_to_fs(place)
    except (ImportError, ValueError) as error:
        raise SlipstreamError(
            f"fsspec cannot open the origin: {error}", where=place,
            remedy="check the URL, and install what fsspec needs for its protocol",
        ) from error  # fmt: skip
    return lambda name: bytes(system.cat_file(f"{root.rstrip('/')}/{name}"))


@dataclass(eq=False, repr=False)
class CachedDataset(Dataset[_T]):
    """A dataset of files for ``torch.utils.data.DataLoader``, read through a cache.

    Attributes:
        names: of the files at the origin, one per sample.
        decode: makes a sample from a file's bytes.
        context: of these reads, such as ``{"split": "train"}``.
    """

    names: Sequence[str]
    cache: ShardCache
    decode: Callable[[bytes], _T]
    context: Mapping[str, str] | None = None

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> _T:
        return self.decode(self.cache.read(self.names[index], self.context))


def throttled(
    fetch: Callable[[str], bytes], latency_s: float, bytes_per_s: float
) -> Callable[[str], bytes]:
    """Return `fetch` slowed down to a latency and a bandwidth, as an origin for trials."""

    def slow(name: str) -> bytes:
        start = time.perf_counter()
        content = fetch(name)
        due = latency_s + len(content) / bytes_per_s
        time.sleep(max(0.0, due - (time.perf_counter() - start)))
        return content

    return slow
