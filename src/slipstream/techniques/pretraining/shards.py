"""Tokenised corpora in checksummed shards, of which a process holds only its batch in memory.

A folder has ``index.json`` and ``shard-00000.bin``, ...: the tokens of all sequences, then int64
offsets [sequences + 1] in tokens, little-endian. Sequence i is number ``i // shards`` of shard
``i % shards``.
"""

from __future__ import annotations

import contextlib
import json
import os
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream.errors import InvalidArgumentError, SlipstreamError
from slipstream.files import write_text
from slipstream.techniques.pretraining.hooks import IGNORED

_INDEX = "index.json"
_BLOCK = 1 << 20
_MASKED, _RANDOM = 0.8, 0.1
"""Shares of chosen tokens that become the mask token or a random one (Devlin et al. 2019)."""


class CorpusError(SlipstreamError):
    """A shard of a corpus is missing, empty or damaged."""


def write_shards(
    sequences: Iterable[Sequence[int]], folder: Path | str, shards: int, vocabulary: int
) -> ShardedTokens:
    """Write sequences of tokens to a new corpus; ``index.json`` comes last, so that it is whole.

    Args:
        sequences: token ids below `vocabulary`; read once.

    Raises:
        InvalidArgumentError: a token is not in the vocabulary; fewer sequences than shards; or the
            folder has a corpus already, or is a file.
    """
    folder = Path(folder)
    if (folder / _INDEX).exists():
        raise InvalidArgumentError("folder", f"{folder} contains a corpus", remedy="pass a new one")
    if shards < 1:
        raise InvalidArgumentError("shards", f"{shards} is less than 1")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidArgumentError("folder", f"{folder} cannot be created: {error}") from error
    dtype = np.dtype("<u2" if vocabulary <= 1 << 16 else "<u4")
    offsets: list[list[int]] = [[0] for _ in range(shards)]
    paths = _paths(folder, shards)
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(path.open("wb")) for path in paths]
        for number, sequence in enumerate(sequences):
            tokens = np.asarray(sequence)
            if tokens.ndim != 1 or not tokens.size or tokens.dtype.kind not in "iu":
                raise InvalidArgumentError(
                    "sequences", f"sequence {number} is not a list of integers, at least one"
                )
            if tokens.min() < 0 or tokens.max() >= vocabulary:
                raise InvalidArgumentError(
                    "sequences", f"sequence {number} has a token that is not below {vocabulary}"
                )
            own = offsets[number % shards]
            own.append(own[-1] + len(tokens))
            files[number % shards].write(tokens.astype(dtype).tobytes())
        if len(offsets[-1]) < 2:
            raise InvalidArgumentError("shards", f"there are fewer sequences than {shards} shards")
        for own, file in zip(offsets, files, strict=True):
            file.write(np.array(own, "<i8").tobytes())
    described = [
        {
            "sequences": len(own) - 1,
            "tokens": own[-1],
            "longest": int(np.diff(own).max()),
            "crc32": _checksum(path),
        }
        for own, path in zip(offsets, paths, strict=True)
    ]
    index = {"vocabulary": vocabulary, "dtype": dtype.str, "shards": described}
    write_text(folder / _INDEX, json.dumps(index))
    return ShardedTokens(folder)


def _paths(folder: Path, shards: int) -> list[Path]:
    return [folder / f"shard-{k:05d}.bin" for k in range(shards)]


def _checksum(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            value = zlib.crc32(block, value)
    return value


class ShardedTokens:
    """A corpus of `write_shards`; its resident memory does not depend on its size.

    Attributes:
        vocabulary: number of tokens.
        longest: tokens of the longest sequence; 0 for a corpus of an earlier version.
        identity: vocabulary and checksums of the shards.
        paths: files of the shards.

    Args:
        folder: see `write_shards`.
        rank, ranks: with which others this process shares the check of all shards.

    Raises:
        CorpusError: the index or a checked shard is missing, empty or damaged.
    """

    def __init__(self, folder: Path, rank: int = 0, ranks: int = 1) -> None:
        try:
            index = json.loads((folder / _INDEX).read_text())
            self.vocabulary, self._dtype = int(index["vocabulary"]), np.dtype(index["dtype"])
            self._counts = [int(shard["sequences"]) for shard in index["shards"]]
            self._tokens = [int(shard["tokens"]) for shard in index["shards"]]
            checksums = [int(shard["crc32"]) for shard in index["shards"]]
            if not checksums:
                raise ValueError("it lists no shards")
            self.longest = max(int(shard.get("longest", 0)) for shard in index["shards"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CorpusError(
                f"the corpus has no readable index: {error}",
                where=str(folder / _INDEX),
                remedy="write it by slipstream.pretraining.write_shards",
            ) from error
        self.identity = [self.vocabulary, *checksums]
        self.paths = _paths(folder, len(checksums))
        for k, (path, checksum) in enumerate(zip(self.paths, checksums, strict=True)):
            size = self._tokens[k] * self._dtype.itemsize + 8 * (self._counts[k] + 1)
            reason = None
            if not self._counts[k]:
                reason = "is empty"
            elif not path.is_file() or path.stat().st_size != size:
                reason = f"is missing or not of {size} bytes"
            elif k % ranks == rank and _checksum(path) != checksum:
                reason = "is damaged: its checksum differs"
            if reason is not None:
                raise CorpusError(
                    f"shard {k} {reason}", where=str(path), remedy="write the corpus again"
                )
        self._open()

    def _open(self) -> None:
        self._files = [os.open(path, os.O_RDONLY) for path in self.paths]

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_files"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Each copy closes its own files.
        vars(self).update(state)
        self._open()

    def __len__(self) -> int:
        return sum(self._counts)

    def __del__(self) -> None:
        for file in getattr(self, "_files", ()):
            os.close(file)

    def __getitem__(self, number: int) -> NDArray[np.int64]:
        """Return the tokens of a sequence, int64 [length]."""
        place, shard = divmod(number, len(self._counts))
        if not 0 <= number < len(self):
            raise IndexError(number)
        file, item = self._files[shard], self._dtype.itemsize
        offset = self._tokens[shard] * item + 8 * place
        begin, end = np.frombuffer(os.pread(file, 16, offset), "<i8").tolist()
        content = os.pread(file, (end - begin) * item, begin * item)
        return np.frombuffer(content, self._dtype).astype(np.int64)


@dataclass(frozen=True)
class MaskedBatches:
    """Batches of masked sequences, the same for any number of ranks and after a restart.

    Attributes:
        corpus: where sequences are read.
        rows: sequences of a batch over all ranks.
        length: longest sequence, at most the model's positions.
        mask_token: the id that replaces a masked token.
        special: ids below are never masked; 0 is padding.
        share: share of the tokens that have a label.
        seed: of the order and the masks, which are new in every epoch.
        start: sequences of earlier batches of another size.
    """

    corpus: ShardedTokens
    rows: int
    length: int
    mask_token: int
    special: int = 5
    share: float = 0.15
    seed: int = 0
    start: int = 0

    def numbers(self, step: int, rank: int = 0, ranks: int = 1) -> list[tuple[int, int]]:
        """Return (epoch, number of the sequence) of a rank's rows in a step."""
        count = len(self.corpus)
        first = self.start + step * self.rows
        places = range(first + rank, first + self.rows, ranks)
        return [
            (place // count, _shuffled(place % count, count, (self.seed, place // count)))
            for place in places
        ]

    def batch(self, numbers: Sequence[tuple[int, int]]) -> dict[str, Any]:
        """Return ``input_ids``, ``attention_mask`` and ``labels``, int64 [rows, longest].

        Raises:
            CorpusError: a sequence is longer than `length`.
        """
        import torch

        found = [self.corpus[number] for _, number in numbers]
        longest = max(map(len, found))
        if longest > self.length:
            number = numbers[max(range(len(found)), key=lambda at: len(found[at]))][1]
            raise CorpusError(
                f"sequence {number} has {longest} tokens, more than the {self.length} "
                "positions", where=str(self.corpus.paths[number % len(self.corpus.paths)]),
                remedy="write the corpus with shorter sequences, or raise the length",
            )  # fmt: skip
        ids = np.zeros((len(found), longest), np.int64)
        labels = np.full_like(ids, IGNORED)
        for row, (tokens, (epoch, number)) in enumerate(zip(found, numbers, strict=True)):
            draws = np.random.Generator(np.random.Philox(key=[self.seed, epoch << 40 | number]))
            chosen = (draws.random(len(tokens)) < self.share) & (tokens >= self.special)
            kind = draws.random(len(tokens))
            other = draws.integers(self.special, self.corpus.vocabulary, len(tokens))
            changed = np.where(kind < _MASKED, self.mask_token, tokens)
            changed = np.where(kind >= 1 - _RANDOM, other, changed)
            labels[row, : len(tokens)][chosen] = tokens[chosen]
            ids[row, : len(tokens)] = np.where(chosen, changed, tokens)
        lengths = np.array([len(tokens) for tokens in found])
        mask = (np.arange(longest) < lengths[:, None]).astype(np.int64)
        parts = {"input_ids": ids, "attention_mask": mask, "labels": labels}
        return {name: torch.from_numpy(part) for name, part in parts.items()}


def _shuffled(place: int, count: int, key: tuple[int, int]) -> int:
    """Return the item at `place` of a pseudo-random permutation, without storing it.

    A Feistel network permutes the next power of four; places beyond `count` are permuted again.
    """
    half = max((count - 1).bit_length() + 1, 2) // 2
    low = (1 << half) - 1
    while True:
        left, right = place >> half, place & low
        for turn in range(4):
            mixed = zlib.crc32(b"%d,%d,%d,%d" % (*key, turn, right))
            left, right = right, left ^ (mixed & low)
        place = left << half | right
        if place < count:
            return place
