"""Export experiments to JSON lines, CSV or Parquet."""

from __future__ import annotations

import csv
import importlib
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from slipstream.errors import InvalidArgumentError, MissingExtraError, SlipstreamError
from slipstream.files import replacing
from slipstream.measure import _codec as codec
from slipstream.measure.records import Claim, Experiment
from slipstream.tables import json_values

COLUMNS = (
    "experiment", "title", "created", "env_id", "arm", "baseline", "metric", "phase", "block",
    "value",
)  # fmt: skip
"""Columns of the long form: one row per sample, values in the metric's unit (ns, bytes)."""

FORMATS = ("jsonl", "csv", "parquet")
_ROWS_PER_GROUP = 1 << 20


def export(experiments: Iterable[tuple[Experiment, Sequence[Claim]]], to: str, path: Path) -> int:
    """Write experiments to `path` atomically and return the number of lines or rows.

    ``jsonl`` has everything, one experiment per line. ``csv`` and ``parquet`` have one row per
    sample, with `COLUMNS`.

    Raises:
        InvalidArgumentError: `to` is not in `FORMATS`.
        MissingExtraError: Parquet requires pyarrow, which is not installed.
        SlipstreamError: The file cannot be written.
    """
    writers = {"jsonl": _write_jsonl, "csv": _write_csv, "parquet": _write_parquet}
    if to not in writers:
        raise InvalidArgumentError(
            "to", f"'{to}' is not a format", remedy="one of " + ", ".join(FORMATS)
        )
    try:
        with replacing(path) as unfinished:
            count = writers[to](experiments, unfinished)
    except OSError as error:
        raise SlipstreamError(
            f"the export cannot be written: {error.strerror or error}",
            where=str(path),
            remedy="name another file with -o",
        ) from error
    return count


def sample_rows(experiment: Experiment) -> Iterator[tuple[Any, ...]]:
    """Yield one tuple per sample, ordered like `COLUMNS`."""
    head = (
        experiment.experiment_id,
        experiment.title,
        experiment.created,
        experiment.environment.env_id,
    )
    for (arm, metric, phase), series in experiment.series.items():
        for block, value in zip(series.blocks.tolist(), series.values.tolist(), strict=True):
            yield (
                *head, arm, experiment.settings.baseline, metric, phase.value, block, value,
            )  # fmt: skip


def experiment_json(experiment: Experiment, claims: Sequence[Claim]) -> dict[str, Any]:
    """Convert an experiment with its samples and claims to JSON values."""
    return {
        "experiment": experiment.experiment_id,
        "title": experiment.title,
        "created": experiment.created,
        "status": experiment.status,
        "env_id": experiment.environment.env_id,
        "environment": dict(experiment.environment.facts),
        "settings": codec.to_plain(experiment.settings),
        "arms": [codec.to_plain(arm) for arm in experiment.arms],
        "claims": [codec.to_plain(claim) for claim in claims],
        "predictions": {arm: codec.to_plain(p) for arm, p in experiment.predictions.items()},
        "events": [codec.to_plain(event) for event in experiment.events],
        "series": [
            {
                "arm": arm,
                "metric": metric,
                "phase": phase.value,
                "blocks": series.blocks.tolist(),
                "values": series.values.tolist(),
            }
            for (arm, metric, phase), series in experiment.series.items()
        ],
    }


def _write_jsonl(experiments: Iterable[tuple[Experiment, Sequence[Claim]]], path: Path) -> int:
    count = 0
    with path.open("w", encoding="utf-8") as file:
        for experiment, claims in experiments:
            plain = json_values(experiment_json(experiment, claims))
            file.write(json.dumps(plain, ensure_ascii=False, allow_nan=False) + "\n")
            count += 1
    return count


def _write_csv(experiments: Iterable[tuple[Experiment, Sequence[Claim]]], path: Path) -> int:
    count = 0
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for experiment, _ in experiments:
            for row in sample_rows(experiment):
                writer.writerow(row)
                count += 1
    return count


def _write_parquet(experiments: Iterable[tuple[Experiment, Sequence[Claim]]], path: Path) -> int:
    try:
        pyarrow = importlib.import_module("pyarrow")
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise MissingExtraError("Parquet export", "pyarrow", "parquet") from None
    text = pyarrow.dictionary(pyarrow.int32(), pyarrow.string())
    kinds = [text] * 8 + [pyarrow.int32(), pyarrow.float64()]
    schema = pyarrow.schema(list(zip(COLUMNS, kinds, strict=True)))
    count = 0
    with parquet.ParquetWriter(path, schema) as writer:
        for experiment, _ in experiments:
            rows = list(sample_rows(experiment))
            columns = list(zip(*rows, strict=True)) or [()] * len(COLUMNS)
            arrays = [pyarrow.array(c, type=k) for c, k in zip(columns, kinds, strict=True)]
            writer.write_table(pyarrow.table(arrays, schema=schema), row_group_size=_ROWS_PER_GROUP)
            count += len(rows)
    return count
