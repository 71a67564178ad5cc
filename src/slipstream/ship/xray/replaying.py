"""The frames of a log once more, through a pipeline and a model that are trusted."""

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
    """Run a reference over what a log's frames were, and record it.

    Args:
        log: of the deployed model.
        reference: a model that is trusted: see `slipstream.runtimes.taps.open_tap`.
        out: where the reference's log is written.
        preprocessing: from a raw input to the reference's input; None to feed it what the deployed
            model was fed, which needs a log of level ``layers``.
        raws: raw inputs in the order of frames, where the log does not say where they lie.
        level: of the new log; that of `log` if None.
        plain_kernels: run the reference on plain kernels.
        report: told how far it is.

    Raises:
        LogError: the log lacks what is needed.
        RawInputError: a raw input is damaged.
        ModelError: the reference fails.
    """
    log = log if isinstance(log, Log) else Log.read(log)
    known = preprocessing if isinstance(preprocessing, Pipeline) else None
    level = level or log.header.get("level", "stats")
    inputs = [n for n, one in enumerate(log.layers) if one.kind == "input"]
    with record(out, level, preprocessing=known, reference=plain_kernels) as recorder:
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
                        remedy="record at level layers, or give preprocessing and raw inputs",
                    )  # fmt: skip
                fed = [frame.tensors[n] for n in inputs]
            else:
                if raw is None:
                    raise LogError(
                        f"where the raw input of frame {number} lies is not known",
                        where=str(log.path), remedy="give raw=path when recording, or raws= here",
                    )  # fmt: skip
                prepared = preprocessing(raw)
                parts = prepared if isinstance(prepared, (tuple, list)) else [prepared]
                # A pipeline makes one sample; a function may have added the batch axis itself.
                fed = [np.asarray(one)[None] if known else np.asarray(one) for one in parts]
            source = frame.facts.get("raw", raw)
            recorder.run(reference, *fed, raw=source, key=frame.facts.get("key"))
    return Path(out)
