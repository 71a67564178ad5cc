"""Near-duplicates in a corpus, by exact Jaccard similarity; one text of each group is kept.

Texts are sets of shingles: every run of so many words that follow each other. Words are what
``\\w+`` finds, in lower case; spaces, punctuation and marks count for nothing, and other forms of
the same letters (Unicode's) are other letters. A null is a text without words.
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
# Odd, without a pattern: the place of a word in its shingle changes the sum.
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)

# Of one document.
_LONGEST_BYTES = 64 << 20


class Shingler:
    """Makes 64-bit numbers of shingles.

    Words are what ``\\w+`` finds, in lower case; each gets a 64-bit hash (BLAKE2b), and a shingle
    the sum of the hashes of its words times odd constants, modulo 2^64. Two different shingles get
    one number with odds of about 2^-64: among N shingles, N^2 / 2^65 collisions are expected, or
    0.0003 for 10^8. A collision makes two texts look more alike by one shingle.

    Args:
        words: of a shingle. A text of fewer words is one shingle, one of none has none.
    """

    def __init__(self, words: int) -> None:
        self.words = words
        self._known: dict[str, int] = {}
        powers = [pow(int(_MULTIPLIER), n, 2**64) for n in range(words)]
        self._powers = np.array(powers, np.uint64)

    def __call__(self, text: str) -> npt.NDArray[np.uint64]:
        """The different shingles of `text`, uint64, ascending."""
        words = _WORD.findall(text.lower())
        hashes = np.array([self._hash(word) for word in words], np.uint64)
        if not len(hashes):
            return hashes
        span = min(self.words, len(hashes))
        sums = np.zeros(len(hashes) - span + 1, np.uint64)
        # Unsigned numbers wrap around, which is what modulo 2^64 is.
        for n in range(span):
            sums += hashes[n : n + len(sums)] * self._powers[n]
        return np.unique(sums)

    def _hash(self, word: str) -> int:
        known = self._known.get(word)
        if known is None:
            digest = hashlib.blake2b(word.encode("utf-8", "surrogatepass"), digest_size=8)
            known = self._known[word] = int.from_bytes(digest.digest(), "little")
        return known


@dataclass(frozen=True, eq=False)
class Deduplicated:
    """Which documents are alike.

    Attributes:
        documents: how many there are.
        group: int64 [documents]; the first document each is alike, directly or through others.
        pairs: near-duplicate pairs among documents with different shingles.
        identical: documents whose shingles are those of an earlier one.
        wordless: documents without words, or null; the first of them is kept.
        shingles: different shingles in all.
    """

    documents: int
    group: Int64s
    pairs: int
    identical: int
    shingles: int
    wordless: int = 0

    @property
    def kept(self) -> npt.NDArray[np.bool_]:
        """bool [documents]; the first of each group."""
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
) -> Deduplicated:
    """Find documents that are alike, and write those that are kept.

    Two documents are alike when their sets of shingles have a Jaccard similarity of at least
    `threshold`; found exactly, up to hash collisions of single shingles (see `Shingler`). Of
    documents connected by such pairs the first is kept.

    Args:
        corpus: a file with a JSON object a line; blank lines are passed over.
        output: where to write the lines that are kept, as they are; whole or not at all.
        field: the text's name in the object.
        threshold: 0 < threshold <= 1.
        shingle: words of a shingle.
        block_bytes: working memory beside the sets; 64 MiB by default.
        progress: called with a short line now and then.

    Raises:
        InvalidArgumentError: `threshold` or `shingle` out of range.
        SlipstreamError: a line is no JSON object with a text in `field`, a file cannot be read or
            written, or there is an `output` and `corpus` is a pipe, which is read only once.
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
    deduplicated = _alike(as_sets(sets), float(threshold), limits.block_bytes, progress)
    if output is not None:
        progress("writing what is kept")
        _write(path, Path(output), deduplicated.kept)
    return deduplicated


def _check_output(corpus: Path, output: Path) -> None:
    """Raise SlipstreamError before the work if lines cannot be read again or `output` written."""
    if output.is_dir():
        raise SlipstreamError("is a folder, not a file", where=str(output))
    if corpus.exists() and not corpus.is_file() and not corpus.is_dir():
        raise SlipstreamError(
            "can be read only once, and the lines that are kept are read again",
            where=str(corpus), remedy="save it to a file first",
        )  # fmt: skip


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Lines that are not blank, with their numbers from 1 on."""
    try:
        with open(path, "rb") as file:
            lines = iter(lambda: file.readline(_LONGEST_BYTES + 1), b"")
            for number, line in enumerate(lines, 1):
                if len(line) > _LONGEST_BYTES:
                    raise SlipstreamError(
                        f"the line has more than {_LONGEST_BYTES >> 20} MiB",
                        where=f"{path}:{number}", remedy="one JSON object a line",
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
            f"the line is no JSON: {error}", where=where, remedy="one JSON object a line"
        ) from error
    if not isinstance(value, dict):
        raise SlipstreamError(
            "the line is no JSON object", where=where, remedy='lines like {"text": "..."}'
        )
    if field not in value:
        names = ", ".join(list(value)[:8]) or "none"
        raise SlipstreamError(
            f"the object has no '{field}'", where=where, remedy=f"--field one of: {names}"
        )
    text = "" if value[field] is None else value[field]
    if not isinstance(text, str):
        raise SlipstreamError(
            f"'{field}' is a {type(text).__name__}, not a text", where=where,
            remedy="texts, or null for none",
        )  # fmt: skip
    return text


def _alike(
    rows: Rows, threshold: float, block_bytes: int, progress: Callable[[str], None]
) -> Deduplicated:
    first_of, unique = _identical(rows)
    parent = np.arange(len(rows))

    def root(i: int) -> int:
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = int(parent[i])
        return i

    pairs = 0
    # Identical sets are one row here: ten thousand equal texts are not fifty million pairs.
    picked = rows.to_scipy()[unique]
    starts = picked.indptr.astype(np.int64)
    some = Rows(starts, picked.indices, picked.data, rows.width, rows.width)
    for i, j, shared, either in overlaps(some, some, threshold, True, block_bytes):
        # As a quotient: 8 / 10 reaches 0.8, although 1 - 0.8 is less than 2 / 10.
        near = shared >= threshold * either
        near |= np.divide(shared, either, out=np.ones(len(i)), where=either > 0) >= threshold
        pairs += int(near.sum())
        for a, b in zip(unique[i[near]].tolist(), unique[j[near]].tolist(), strict=True):
            one, other = root(a), root(b)
            # Towards the lower number, so that a group is named by its first document.
            parent[max(one, other)] = min(one, other)
        progress(f"{int(i[-1]) + 1:,} of {len(unique):,} compared, {pairs:,} pairs")
    group = np.array([root(int(i)) for i in first_of], np.int64)
    return Deduplicated(
        len(rows), group, pairs, len(rows) - len(unique), int(rows.nnz and rows.width),
        int((np.diff(rows.indptr) == 0).sum()),
    )  # fmt: skip


def _identical(rows: Rows) -> tuple[Int64s, Int64s]:
    """The first row with the same columns, for each row; and the rows that are such first ones."""
    seen: dict[bytes, int] = {}
    first_of = np.empty(len(rows), np.int64)
    for i in range(len(rows)):
        columns = rows.indices[rows.indptr[i] : rows.indptr[i + 1]].tobytes()
        first_of[i] = seen.setdefault(columns, i)
    return first_of, np.flatnonzero(first_of == np.arange(len(rows)))


def _write(source: Path, target: Path, kept: npt.NDArray[np.bool_]) -> None:
    try:
        with replacing(target) as beside, open(beside, "wb") as file:
            for (_, line), keep in zip(_lines(source), kept.tolist(), strict=True):
                if keep:
                    file.write(line if line.endswith(b"\n") else line + b"\n")
    except OSError as error:
        raise SlipstreamError(f"cannot be written: {error.strerror}", where=str(target)) from error
    except ValueError as error:
        raise SlipstreamError(
            "the corpus changed while it was read", where=str(source), remedy="run it again"
        ) from error


def as_sets(sets: Iterable[npt.NDArray[np.uint64]]) -> Rows:
    """Rows of ones, float32, from ascending numbers; a column for each number that occurs."""
    listed = list(sets)
    starts: Int64s = np.concatenate([[0], np.cumsum([len(one) for one in listed], dtype=np.int64)])
    joined = np.concatenate([*listed, np.empty(0, np.uint64)])
    known, columns = np.unique(joined, return_inverse=True)
    width = max(len(known), 1)
    ones = np.ones(len(columns), np.float32)
    # Numbers ascend within a row, and so do their places among all.
    return Rows(starts, columns.astype(np.int32 if width < 2**31 else np.int64), ones, width, width)
