"""Match layers of two models whose names differ."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from slipstream.runtimes.taps import TappedTensor
from slipstream.ship.xray.log import model_layers
from slipstream.ship.xray.statistics import Array

# Layers with at least this relative distance of projections are not matched.
_MAX_DISTANCE = 0.8


def match(
    reference: Sequence[TappedTensor],
    candidate: Sequence[TappedTensor],
    references: Array,
    candidates: Array,
) -> list[tuple[int, int]]:
    """Return pairs of indices of equal layers, in the candidate's order.

    Layers match by name first; the remaining ones by `STATISTICS` [frames, tensors] of some frames:
    the cheapest alignment of both orders, where a pair costs the distance of its projections. Their
    tensors have the same size.
    """
    ours, theirs = model_layers(reference), model_layers(candidate)
    by_name = {plain(reference[n].name): n for n in ours}
    pairs = []
    for number in theirs:
        partner = by_name.get(plain(candidate[number].name))
        if partner is not None and _same_size(references, candidates, partner, number):
            pairs.append((partner, number))
    matched, partners = {a for a, _ in pairs}, {b for _, b in pairs}
    remaining = [n for n in ours if n not in matched]
    others = [n for n in theirs if n not in partners]
    pairs += _aligned(references[:, remaining], candidates[:, others], remaining, others)
    return sorted(pairs, key=lambda pair: pair[1])


def plain(name: str) -> str:
    """Return a tensor's name without the affixes of exporters."""
    name = name.split(";")[0].strip("/").replace("/", ".")
    for ending in ("_output_0", "_quantized", "_DequantizeLinear_Output"):
        name = name.removesuffix(ending)
    return name


def _same_size(references: Array, candidates: Array, a: int, b: int) -> bool:
    both = (references["elements"][:, a] > 0) & (candidates["elements"][:, b] > 0)
    return bool(both.any()) and bool(
        (references["elements"][:, a] == candidates["elements"][:, b])[both].all()
    )


def _aligned(
    references: Array, candidates: Array, ours: Sequence[int], theirs: Sequence[int]
) -> list[tuple[int, int]]:
    if not ours or not theirs:
        return []
    a = references["projections"].astype(np.float64)
    b = candidates["projections"].astype(np.float64)
    distance = np.square(a[:, :, None] - b[:, None, :]).sum((0, 3))
    size = np.square(a).sum((0, 2))[:, None] + np.square(b).sum((0, 2))[None]
    cost = np.sqrt(distance / np.maximum(size, 1e-12))
    same = (references["elements"][:, :, None] == candidates["elements"][:, None, :]).all(0)
    gain = np.where(same & (cost < _MAX_DISTANCE), 1.0 + (_MAX_DISTANCE - cost), 0.0)
    best = np.zeros((len(ours) + 1, len(theirs) + 1))
    for i in range(1, len(ours) + 1):
        # Per row: a pair, or the best without this layer; then without each of the others.
        row = np.maximum(
            best[i - 1, 1:], np.where(gain[i - 1] > 0, best[i - 1, :-1] + gain[i - 1], 0)
        )
        best[i, 1:] = np.maximum.accumulate(row)
    pairs = []
    i, j = len(ours), len(theirs)
    while i and j:
        if best[i, j] == best[i - 1, j]:
            i -= 1
        elif best[i, j] == best[i, j - 1]:
            j -= 1
        else:
            pairs.append((ours[i - 1], theirs[j - 1]))
            i, j = i - 1, j - 1
    return pairs[::-1]


def coverage(layers: Sequence[TappedTensor], matched: set[int]) -> float:
    """Return the share of a model's multiplications that its matched layers account for.

    Multiplications of an unmatched layer count if a later layer, before the next one that
    multiplies, is matched: an activation represents its convolution.
    """
    total = covered = pending = 0
    for number in model_layers(layers):
        if layers[number].macs:
            pending = layers[number].macs
            total += pending
        if number in matched:
            covered += pending
            pending = 0
    if total:
        return covered / total
    return len(matched) / max(len(model_layers(layers)), 1)
