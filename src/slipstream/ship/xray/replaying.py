"""Replay a log's frames through a trusted pipeline and model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.errors import InvalidArgumentError
from slipstream.runtimes.preprocessing import Pipeline
from slipstream.ship.xray.comparing import raw_of
from slipstream.ship.xray.log import Log, LogError
from slipstream.ship.xray.recording import Level, record


def replay(
    log: Path | str | Log,
    reference: Any,
    out: Path | str,
    *,
    preprocessing: Pipeline | Callable[[Any], Any] | None = None,
    raws: Sequence[Any] | None = None,
    level: Level | None = None,
    plain_kernels: bool = False,
    report: Callable[[str], None] = lambda line: None,
) -> Path:
    """Run a reference on the frames of a log, and record it.

    Args:
        log: log of the deployed model.
        reference: a trusted model, as for `slipstream.runtimes.taps.open_tap`.
        out: the log to write.
        preprocessing: from a raw input to the reference's input; None to use the deployed model's
            inputs, which requires a log of level ``layers``.
        raws: raw inputs in the order of frames, if the log does not have them.
        level: level of the new log; that of `log` if None.
        plain_kernels: whether to run the reference on reference kernels.
        report: called with progress messages.

    Raises:
        LogError: the log lacks required data.
        RawInputError: a raw input is damaged.
        ModelError: the reference fails.
    """
    log = log if isinstance(log, Log) else Log.read(log)
    pipeline = preprocessing if isinstance(preprocessing, Pipeline) else None
    level = level or log.header.get("level", "stats")
    inputs = [n for n, layer in enumerate(log.layers) if layer.kind == "input"]
    with record(out, level, preprocessing=pipeline, reference=plain_kernels) as recorder:
        for number, frame in enumerate(log.frames()):
            report(f"frame {number + 1} of {log.count}")
            raw = None
            if raws is not None:
                if number >= len(raws):
                    raise InvalidArgumentError("raws", f"{len(raws)} for {log.count} frames")
                raw = raws[number]
            elif preprocessing is not None:
                raw = raw_of(frame.facts)
            if preprocessing is None:
                if any(n not in frame.tensors for n in inputs):
                    raise LogError(
                        f"frame {number} holds no model input to replay", where=str(log.path),
                        remedy="record at level layers, or pass preprocessing and raw inputs",
                    )  # fmt: skip
                fed = [frame.tensors[n] for n in inputs]
            else:
                if raw is None:
                    raise LogError(
                        f"the raw input of frame {number} is missing",
                        where=str(log.path), remedy="pass raw=path when recording, or raws= here",
                    )  # fmt: skip
                prepared = preprocessing(raw)
                parts = prepared if isinstance(prepared, (tuple, list)) else [prepared]
                # A pipeline returns one sample; a function adds the batch axis itself.
                fed = [np.asarray(part)[None] if pipeline else np.asarray(part) for part in parts]
            source = frame.facts.get("raw", raw)
            recorder.run(reference, *fed, raw=source, key=frame.facts.get("key"))
    return Path(out)
