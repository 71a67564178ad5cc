"""Evidence for the rules beyond events: files read before the clock, samples evaluated."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from torch.utils._pytree import tree_leaves

import slipstream

# Suffixes of data files; initial weights (.pth, .safetensors) may be read before the clock starts.
_SAMPLES = re.compile(
    r"\.(npy|npz|csv|tsv|gz|bz2|xz|zst|zip|tar|parquet|arrow|feather|jsonl|h5|hdf5|mat|pkl|pickle|pt|"
    r"tfrecord|idx|bin|dat|wav|flac|mp3|jpe?g|png|webp|bmp)$",
    re.IGNORECASE,
)
_CODE = re.compile(r"\.(py|pyc|pyi|so|toml|cfg|ini|ya?ml|pth|ckpt|safetensors)$", re.IGNORECASE)
_MAX_FILES = 100
Hashes = npt.NDArray[np.uint64]


class OpenedFiles:
    """Context manager that records the data files that this process opens for reading.

    It does not see files that native code opens.

    Attributes:
        paths: file paths in the order in which they were first opened.
    """

    def __init__(self, place: Path | None) -> None:
        """
        Args:
            place: folder of the task's file, in which every file but code counts as data.
        """
        self.paths: dict[str, None] = {}
        named = os.environ.get("SLIPSTREAM_DATA")
        folders = (place, Path(named) if named else None)
        self._folders = [folder.resolve() for folder in folders if folder is not None]
        self._libraries = [Path(sys.prefix), Path(slipstream.__path__[0])]
        self._active = False
        # An audit hook cannot be removed; `_active` turns it off.
        sys.addaudithook(self._hook)

    def __enter__(self) -> Self:
        self._active = True
        return self

    def __exit__(self, *_: object) -> None:
        self._active = False

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self._active or event != "open" or len(self.paths) >= _MAX_FILES:
            return
        path, _, flags = arguments
        if isinstance(path, (str, bytes)) and not flags & (os.O_WRONLY | os.O_RDWR):
            name = os.path.abspath(os.fsdecode(path))
            # Python tries the archives of `sys.path`, whether or not they exist.
            if name in sys.path or not os.path.isfile(name):
                return
            if _SAMPLES.search(name) or (self._inside(Path(name)) and not _CODE.search(name)):
                self.paths.setdefault(name)

    def _inside(self, path: Path) -> bool:
        """Whether a file is in a data folder or the task's, and not part of a library."""
        library = any(path.is_relative_to(folder) for folder in self._libraries)
        return not library and any(path.is_relative_to(folder) for folder in self._folders)


class Samples:
    """Hashes of the model's inputs per sample, in training and in evaluation."""

    def __init__(self) -> None:
        self._trained: list[Hashes] = []
        self._evaluated: list[Hashes] = []
        self._batches: set[bytes] = set()

    def train(self, batch: Any) -> None:
        """Add the samples of a training batch, (inputs, targets)."""
        inputs = batch[0] if isinstance(batch, (tuple, list)) and batch else batch
        self._trained.append(hashes(inputs))

    def evaluate(self, arguments: Any) -> None:
        """Add the samples of one forward call; a repeated batch counts once."""
        batch = hashes(arguments)
        if batch.tobytes() not in self._batches:
            self._batches.add(batch.tobytes())
            self._evaluated.append(batch)

    @property
    def evaluated(self) -> int:
        """Number of evaluated samples; 0 if the model was never called as a module."""
        return sum(map(len, self._evaluated))

    @property
    def shared(self) -> float:
        """Share of distinct evaluated samples that were also trained on, 0 to 1."""
        if not self.evaluated or not self._trained:
            return 0.0
        evaluated = np.unique(np.concatenate(self._evaluated))
        return float(np.isin(evaluated, np.concatenate(self._trained)).mean())


def hashes(inputs: Any) -> Hashes:
    """Hash each sample of a tensor [samples, ...], or of all tensors of that length in a pytree."""
    tensors = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor) and leaf.ndim]
    if not tensors:
        return np.zeros(0, np.uint64)
    count = len(tensors[0])
    total = np.zeros(count, np.uint64)
    for number, tensor in enumerate(leaf for leaf in tensors if len(leaf) == count):
        values = tensor.detach().cpu().contiguous()
        if count and values.numel():
            words = _words(values.reshape(count, -1))
            random = np.random.default_rng([number, words.shape[1]])
            total += words @ (random.integers(0, 2**63, words.shape[1], np.uint64) * 2 + 1)
    return total


def _words(rows: torch.Tensor) -> Hashes:
    """View [samples, values] as integers of the widest type whose size divides a row's bytes."""
    data = rows.view(torch.uint8).numpy()
    width = next(size for size in (8, 4, 2, 1) if data.shape[1] % size == 0)
    return data.view(f"u{width}").astype(np.uint64)
