"""Read samples from a data set, a file, a function, or a workload's batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from slipstream.errors import InvalidArgumentError
from slipstream.files import read_arrays
from slipstream.runtimes.runtime import Array, Runtime


def read_samples(source: str | None, model: Runtime) -> tuple[list[Array], Array | None]:
    """Read samples as arrays [N, ...], one per input, and labels int64 [N] (None without labels).

    Args:
        source: a data set of `slipstream.data` with images or rows; an ``.npz`` with ``x`` and
            optionally ``y``; ``file.py:function``, which returns (x, y) or x, with x one array or
            several; None for the batch of the workload that `model` was built from.

    Raises:
        SlipstreamError: there are no such data.
    """
    if source is None:
        samples = getattr(model, "samples", None)
        if samples is None:
            raise InvalidArgumentError(
                "data",
                "the model has no samples",
                remedy="pass --data digits, --data file.npz, ...",
            )
        return list(samples), _classes(getattr(model, "targets", None))
    if ".py:" in source:
        from slipstream.runtimes.python import function_at

        result = function_at(source)()
        pair = isinstance(result, tuple) and len(result) == 2
        x, y = result if pair else (result, None)
        return _parts(x), _classes(None if y is None else np.asarray(y))
    if Path(source).suffix == ".npz":
        return _read_npz(Path(source))
    return _read_named(source)


def _read_npz(path: Path) -> tuple[list[Array], Array | None]:
    arrays = read_arrays(path)
    if "x" not in arrays:
        raise InvalidArgumentError("data", f"{path} has no array named x", remedy="save x, and y")
    return [arrays["x"]], _classes(arrays.get("y"))


def _read_named(name: str) -> tuple[list[Array], Array | None]:
    from slipstream import data

    # Accuracy is measured on held-out samples if the data set has a test part.
    options = {"split": "test"} if name in ("fashion_mnist", "cifar10_jpeg") else {}
    dataset = data.get(name, **options)
    if isinstance(dataset, data.Images):
        return [dataset.images], _classes(dataset.labels)
    if isinstance(dataset, data.Tabular):
        targets = _classes(dataset.targets.astype(np.int64)) if dataset.classes else None
        return [dataset.features.astype(np.float32)], targets
    raise InvalidArgumentError(
        "data",
        f"'{name}' has neither images nor rows",
        remedy="pass a function that returns (x, y): --data file.py:function",
    )


def _parts(x: Any) -> list[Array]:
    parts = x if isinstance(x, (tuple, list)) else (x,)
    return [np.asarray(part) for part in parts]


def _classes(labels: Array | None) -> Array | None:
    if labels is None or labels.ndim != 1 or labels.dtype.kind not in "iu" or (labels < 0).any():
        return None
    return labels.astype(np.int64)
