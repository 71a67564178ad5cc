"""Near-duplicates in a corpus, by exact Jaccard similarity; one text of each group is kept.

Texts are sets of shingles: all sequences of consecutive words of a given length. Words are what
``\\w+`` finds, in lower case; spaces, punctuation and marks are ignored, and other Unicode forms of
the same letters are different letters. A null is a text without words.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from slipstream.errors import InvalidArgumentError, SlipstreamError
from slipstream.files import replacing
from slipstream.sparse.join import overlaps
from slipstream.sparse.matrix import Int64s, Rows
from slipstream.sparse.search import Limits

_WORD = re.compile(r"\w+")
# Odd, without a pattern: the sum depends on the position of a word in its shingle.
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)

# Maximum size of one document.
_MAX_BYTES = 64 << 20


class Shingler:
    """Computes 64-bit hashes of shingles.

    Words are what ``\\w+`` finds, in lower case; each gets a 64-bit hash (BLAKE2b), and a shingle
    the sum of the hashes of its words times odd constants, modulo 2^64. Two different shingles have
    the same hash with probability 2^-64: among N shingles, N^2 / 2^65 collisions are expected, or
    0.0003 for 10^8. A collision makes two texts look more similar by one shingle.

    Args:
        words: words per shingle. A text of fewer words is one shingle, an empty text has none.
    """

    def __init__(self, words: int) -> None:
        self.words = words
        self._hashes: dict[str, int] = {}
        powers = [pow(int(_MULTIPLIER), n, 2**64) for n in range(words)]
        self._powers = np.array(powers, np.uint64)

    def __call__(self, text: str) -> npt.NDArray[np.uint64]:
        """Return the distinct hashes of `text`'s shingles, uint64, ascending."""
        words = _WORD.findall(text.lower())
        hashes = np.array([self._hash(word) for word in words], np.uint64)
        if not len(hashes):
            return hashes
        span = min(self.words, len(hashes))
        sums = np.zeros(len(hashes) - span + 1, np.uint64)
        # Unsigned integers wrap around, as modulo 2^64 requires.
        for n in range(span):
            sums += hashes[n : n + len(sums)] * self._powers[n]
        return np.unique(sums)

    def _hash(self, word: str) -> int:
        hashed = self._hashes.get(word)
        if hashed is None:
            digest = hashlib.blake2b(word.encode("utf-8", "surrogatepass"), digest_size=8)
            hashed = self._hashes[word] = int.from_bytes(digest.digest(), "little")
        return hashed


@dataclass(frozen=True, eq=False)
class DedupResult:
    """Groups of similar documents.

    Attributes:
        documents: number of documents.
        group: int64 [documents]; the first document that each is similar to, directly or through
            others.
        pairs: near-duplicate pairs among documents with different shingles.
        identical: documents with the same shingles as an earlier one.
        wordless: documents without words, or null; the first of them is kept.
        shingles: distinct shingles in all documents.
    """

    documents: int
    group: Int64s
    pairs: int
    identical: int
    shingles: int
    wordless: int = 0

    @property
    def is_first(self) -> npt.NDArray[np.bool_]:
        """Whether each document is the first of its group, bool [documents]."""
        first: npt.NDArray[np.bool_] = self.group == np.arange(self.documents)
        return first


def dedup(
    corpus: str | Path,
    output: str | Path | None = None,
    *,
    field: str = "text",
    threshold: float = 0.8,
    shingle: int = 5,
    block_bytes: int | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> DedupResult:
    """Find similar documents, and write the first document of each group.

    Two documents are similar if their sets of shingles have a Jaccard similarity of at least
    `threshold`. The search is exact, up to hash collisions of single shingles (see `Shingler`). Of
    documents connected by such pairs the first is kept.

    Args:
        corpus: a file with a JSON object per line; blank lines are skipped.
        output: file for the lines that are kept, unchanged; written completely or not at all.
        field: the text's name in the object.
        threshold: 0 < threshold <= 1.
        shingle: words per shingle.
        block_bytes: working memory in addition to the sets; 64 MiB by default.
        progress: called with a short line from time to time.

    Raises:
        InvalidArgumentError: `threshold` or `shingle` out of range.
        SlipstreamError: a line is not a JSON object with a text in `field`, a file cannot be read
            or written, or there is an `output` and `corpus` is a pipe, which can be read once.
    """
    if not isinstance(threshold, int | float) or not 0 < threshold <= 1:
        raise InvalidArgumentError("threshold", f"{threshold!r} is not above 0 and at most 1")
    if not isinstance(shingle, int) or isinstance(shingle, bool) or shingle < 1:
        raise InvalidArgumentError("shingle", f"{shingle!r} is not a positive number of words")
    limits = Limits.of(None, block_bytes)
    path = Path(corpus)
    if output is not None:
        _check_output(path, Path(output))
    sets = []
    make = Shingler(shingle)
    for number, line in _lines(path):
        sets.append(make(_text(line, field, f"{path}:{number}")))
        if len(sets) % 1000 == 0:
            progress(f"{len(sets):,} documents read")
    progress(f"comparing {len(sets):,} documents")
    deduplicated = _grouped(as_sets(sets), float(threshold), limits.block_bytes, progress)
    if output is not None:
        progress("writing the documents that are kept")
        _write(path, Path(output), deduplicated.is_first)
    return deduplicated


def _check_output(corpus: Path, output: Path) -> None:
    """Check, before the work, that lines can be read again and `output` can be written."""
    if output.is_dir():
        raise SlipstreamError("is a folder, not a file", where=str(output))
    if corpus.exists() and not corpus.is_file() and not corpus.is_dir():
        raise SlipstreamError(
            "can be read only once, but is read again to write the lines that are kept",
            where=str(corpus), remedy="save it to a file first",
        )  # fmt: skip


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that are not blank, with their numbers from 1."""
    try:
        with open(path, "rb") as file:
            lines = iter(lambda: file.readline(_MAX_BYTES + 1), b"")
            for number, line in enumerate(lines, 1):
                if len(line) > _MAX_BYTES:
                    raise SlipstreamError(
                        f"the line has more than {_MAX_BYTES >> 20} MiB",
                        where=f"{path}:{number}", remedy="write one JSON object per line",
                    )  # fmt: skip
                if line.strip():
                    yield number, line
    except OSError as error:
        raise SlipstreamError(f"cannot be read: {error.strerror}", where=str(path)) from error


def _text(line: bytes, field: str, where: str) -> str:
    try:
        value: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise SlipstreamError(
            f"the line is not JSON: {error}", where=where, remedy="write one JSON object per line"
        ) from error
    if not isinstance(value, dict):
        raise SlipstreamError(
            "the line is not a JSON object", where=where, remedy='write lines like {"text": "..."}'
        )
    if field not in value:
        names = ", ".join(list(value)[:8]) or "none"
        raise SlipstreamError(
            f"the object has no '{field}'", where=where, remedy=f"pass --field one of: {names}"
        )
    text = "" if value[field] is None else value[field]
    if not isinstance(text, str):
        raise SlipstreamError(
            f"'{field}' is a {type(text).__name__}, not a text", where=where,
            remedy="write a string, or null for an empty text",
        )  # fmt: skip
    return text


def _grouped(
    rows: Rows, threshold: float, block_bytes: int, progress: Callable[[str], None]
) -> DedupResult:
    first_of, unique = _identical(rows)
    parent = np.arange(len(rows))

    def root(i: int) -> int:
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = int(parent[i])
        return i

    pairs = 0
    # Identical sets are one row here: ten thousand equal texts would be fifty million pairs.
    picked = rows.to_scipy()[unique]
    starts = picked.indptr.astype(np.int64)
    some = Rows(starts, picked.indices, picked.data, rows.width, rows.width)
    for i, j, shared, either in overlaps(some, some, threshold, True, block_bytes):
        # As a quotient: 8 / 10 reaches 0.8, although 1 - 0.8 is less than 2 / 10.
        near = shared >= threshold * either
        near |= np.divide(shared, either, out=np.ones(len(i)), where=either > 0) >= threshold
        pairs += int(near.sum())
        for a, b in zip(unique[i[near]].tolist(), unique[j[near]].tolist(), strict=True):
            first, second = root(a), root(b)
            # Towards the lower number, so that the first document names the group.
            parent[max(first, second)] = min(first, second)
        progress(f"{int(i[-1]) + 1:,} of {len(unique):,} compared, {pairs:,} pairs")
    group = np.array([root(int(i)) for i in first_of], np.int64)
    return DedupResult(
        len(rows), group, pairs, len(rows) - len(unique), int(rows.nnz and rows.width),
        int((np.diff(rows.indptr) == 0).sum()),
    )  # fmt: skip


def _identical(rows: Rows) -> tuple[Int64s, Int64s]:
    """Return the first row with the same columns, for each row; and the distinct first rows."""
    seen: dict[bytes, int] = {}
    first_of = np.empty(len(rows), np.int64)
    for i in range(len(rows)):
        columns = rows.indices[rows.indptr[i] : rows.indptr[i + 1]].tobytes()
        first_of[i] = seen.setdefault(columns, i)
    return first_of, np.flatnonzero(first_of == np.arange(len(rows)))


def _write(source: Path, target: Path, mask: npt.NDArray[np.bool_]) -> None:
    try:
        with replacing(target) as temporary, open(temporary, "wb") as file:
            for (_, line), keep in zip(_lines(source), mask.tolist(), strict=True):
                if keep:
                    file.write(line if line.endswith(b"\n") else line + b"\n")
    except OSError as error:
        raise SlipstreamError(f"cannot be written: {error.strerror}", where=str(target)) from error
    except ValueError as error:
        raise SlipstreamError(
            "the corpus changed while it was read", where=str(source), remedy="run it again"
        ) from error


def as_sets(sets: Iterable[npt.NDArray[np.uint64]]) -> Rows:
    """Return rows of ones, float32, from ascending hashes; each distinct hash is a column."""
    listed = list(sets)
    starts: Int64s = np.concatenate(
        [[0], np.cumsum([len(hashes) for hashes in listed], dtype=np.int64)]
    )
    joined = np.concatenate([*listed, np.empty(0, np.uint64)])
    distinct, columns = np.unique(joined, return_inverse=True)
    width = max(len(distinct), 1)
    ones = np.ones(len(columns), np.float32)
    # Hashes ascend within a row, and so do their indices among all hashes.
    return Rows(starts, columns.astype(np.int32 if width < 2**31 else np.int64), ones, width, width)
