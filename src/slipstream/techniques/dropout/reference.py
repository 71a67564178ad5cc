"""Dropout in numpy, which every compiled kernel matches bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

ROUNDS = 7
_MULTIPLIER = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)
_BATCH, _BLOCKS = 64, 8
_LOWER_BITS = 1 << 63
_LOW, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)

Words = NDArray[np.uint64]


def philox(block: Words, key: int, upper: int, rounds: int = ROUNDS) -> Words:
    """Return Philox 4x32 random numbers: four of 32 bits for each block, uint64 [blocks, 4].

    Args:
        block: the lower half of each counter, uint64 [blocks].
        key: 64 bits.
        upper: 64 bits, the upper half of every counter.

    Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
    """
    word = [block & _LOW, block >> _HALF]
    word += [np.full_like(block, upper & 0xFFFFFFFF), np.full_like(block, upper >> 32)]
    for number in range(rounds):
        keys = [
            np.uint64((half + number * weyl) & 0xFFFFFFFF)
            for half, weyl in zip((key & 0xFFFFFFFF, key >> 32), _WEYL, strict=True)
        ]
        first, second = word[0] * _MULTIPLIER[0], word[2] * _MULTIPLIER[1]
        word = [
            (second >> _HALF) ^ word[1] ^ keys[0],
            second & _LOW,
            (first >> _HALF) ^ word[3] ^ keys[1],
            first & _LOW,
        ]
    return np.stack(word, axis=1)


def retained_mask(
    count: int, seed: tuple[int, int], threshold: int, rounds: int = ROUNDS
) -> NDArray[np.bool_]:
    """Return which of `count` elements are retained, bool [count].

    Each batch of 64 elements draws eight blocks: 64 numbers of 16 bits. The first half of the
    batch uses words 0 and 1 of each block, the second half words 2 and 3, the low half of each
    word first. Numbers below the upper 16 bits of `threshold` drop their element; numbers equal to
    them drop it if the number at the same index of a second stream is below the lower 16 bits.

    Args:
        seed: the key and the upper half of every counter, 64 bits each.
        threshold: how many of 2^32 numbers drop an element.
    """
    batches = -(-count // _BATCH)
    blocks = np.arange(batches * _BLOCKS, dtype=np.uint64)
    upper_bits = _in_order(philox(blocks, *seed, rounds))
    lower_bits = _in_order(philox(blocks | np.uint64(_LOWER_BITS), *seed, rounds))
    upper, lower = threshold >> 16, threshold & 0xFFFF
    keep: NDArray[np.bool_] = (upper_bits > upper) | ((upper_bits == upper) & (lower_bits >= lower))
    return keep[:count]


def _in_order(words: Words) -> NDArray[np.uint16]:
    """Return the 16-bit numbers of blocks in the order of elements."""
    numbers = words.astype("<u4").view("<u2").reshape(-1, _BLOCKS, 2, 4)
    ordered: NDArray[np.uint16] = numbers.transpose(0, 2, 1, 3).reshape(-1)
    return ordered


def drop(x: NDArray[Any], seed: tuple[int, int], threshold: int, scale: np.float32) -> NDArray[Any]:
    """Scale the retained elements of `x` and zero the others; same shape and dtype.

    Args:
        x: float32, or the bits of bfloat16 as uint16.
    """
    keep = retained_mask(x.size, seed, threshold).reshape(x.shape)
    with np.errstate(over="ignore", invalid="ignore"):
        if x.dtype == np.float32:
            return np.where(keep, x * scale, np.float32(0))
        wide = (x.astype(np.uint32) << 16).view(np.float32) * scale
    bits = wide.view(np.uint32)
    return np.where(keep, (bits + 0x7FFF + (bits >> 16 & 1)) >> 16, 0).astype(np.uint16)
