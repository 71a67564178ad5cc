"""Load models from the arguments of a command line."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from slipstream.errors import InvalidArgumentError, UnknownNameError
from slipstream.runtimes.runtime import ModelError, Runtime

Kind = Literal["torch", "onnx", "litert", "http", "callable"]
_BY_SUFFIX: dict[str, Kind] = {".onnx": "onnx", ".tflite": "litert"}
_KINDS: tuple[Kind, ...] = ("torch", "onnx", "litert", "http", "callable")


def kind_of(source: str) -> Kind:
    """Return the runtime for `source`; ``torch`` for ``file.py:function``, without inspecting it.

    Raises:
        InvalidArgumentError: `source` is not a model.
    """
    if source.startswith(("http://", "https://")):
        return "http"
    if ".py:" in source:
        return "torch"
    kind = _BY_SUFFIX.get(Path(source).suffix.lower())
    if kind is None:
        raise InvalidArgumentError(
            "MODEL",
            f"'{source}' is not a model",
            remedy="pass model.onnx, model.tflite, http://127.0.0.1:PORT/..., or file.py:function",
        )
    return kind


def load(
    source: str,
    *,
    kind: Kind | None = None,
    threads: int = 1,
    arguments: Mapping[str, Any] | None = None,
    techniques: Sequence[Any] = (),
    timeout_s: float = 30.0,
) -> Runtime:
    """Load a model to run batches in this process.

    Args:
        source: ``model.onnx``, ``model.tflite``, ``http://HOST:PORT/...`` of a server with the Open
            Inference Protocol, or ``file.py:function``. A function with required parameters is
            called with batches; another one must build a workload, whose model is loaded.
        kind: the runtime, if `source` does not determine it.
        threads: threads per operator.
        arguments: arguments of the function that builds a workload.
        techniques: techniques to apply to the workload.
        timeout_s: time limit of a server's answer.

    Raises:
        InvalidArgumentError: `source` is not a model.
        MissingExtraError: the runtime's library is not installed.
        ModelError: the model cannot be loaded.
        WorkloadError: the user's code fails.
    """
    if kind is not None and kind not in _KINDS:
        raise UnknownNameError("runtime", kind, _KINDS)
    kind = kind or kind_of(source)
    if kind == "http":
        from slipstream.runtimes.http import HttpRuntime

        return HttpRuntime(source, timeout_s=timeout_s)
    if kind in ("onnx", "litert"):
        from slipstream.runtimes import files

        if techniques:
            raise InvalidArgumentError(
                "technique", f"techniques apply to torch models only, not to {source}"
            )
        path = Path(source)
        if not path.is_file():
            raise ModelError(f"there is no file '{source}'", remedy="check the path")
        return (files.OnnxRuntime if kind == "onnx" else files.LiteRT)(path, threads)
    from slipstream.runtimes import python
    from slipstream.workload import Workload

    function = python.function_at(source)
    if kind == "callable" or python.required_parameters(function):
        return python.CallableRuntime(Path(source).name, function)
    workload = Workload.parse(source, **dict(arguments or {})).with_technique(*techniques)
    with tempfile.TemporaryDirectory(prefix="slipstream-") as keep_in:
        return python.TorchRuntime.of_workload(workload, Path(keep_in), threads)
