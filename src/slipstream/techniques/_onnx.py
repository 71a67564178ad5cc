"""Export of models to ONNX files, with torch's TorchScript exporter."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from slipstream.errors import MissingExtraError, SlipstreamError
from slipstream.files import replacing

OPSET = 18
"""First opset whose bitwise operators accept integers."""


def write(
    model: nn.Module,
    arguments: tuple[Any, ...],
    path: str | Path,
    input_names: Sequence[str],
    output_names: Sequence[str],
) -> Path:
    """Write `model` traced with `arguments`; the first dimension of each tensor is dynamic.

    Raises:
        MissingExtraError: the package onnx is not installed.
        SlipstreamError: the file cannot be written.
    """
    try:
        import onnx  # noqa: F401
    except ImportError as error:
        raise MissingExtraError("export to ONNX", "onnx", "onnx") from error
    target, cache = Path(path), torch.is_autocast_cache_enabled()
    try:
        with replacing(target) as part, torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about tracing, and the deprecation of this exporter
            torch.onnx.export(
                model, arguments, str(part), dynamo=False, opset_version=OPSET,
                input_names=list(input_names), output_names=list(output_names),
                dynamic_axes={name: {0: "batch"} for name in [*input_names, *output_names]},
            )  # fmt: skip
    except OSError as error:
        raise SlipstreamError(f"cannot be written: {error.strerror}", where=str(target)) from error
    finally:
        # The exporter disables autocast's cache, and leaves it disabled if the model raises.
        torch.set_autocast_cache_enabled(cache)
    return target
