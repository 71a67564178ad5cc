"""Texts as sets of shingles: every run of so many words that follow each other."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from slipstream.sparse.matrix import Int64s, Rows

_WORD = re.compile(r"\w+")
# Odd, without a pattern: the place of a word in its shingle changes the sum.
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


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
