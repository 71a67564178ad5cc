"""Runtimes for model files: ONNX Runtime and LiteRT."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.errors import MissingExtraError
from slipstream.runtimes.runtime import Array, ModelError, Runtime, TensorSpec, loading

_ONNX_TYPES = {"float": "float32", "double": "float64"}


def onnxruntime() -> Any:
    """Import ONNX Runtime with telemetry disabled.

    Raises:
        MissingExtraError: onnxruntime is not installed.
    """
    # Read at import only; the call below disables later events.
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    try:
        import onnxruntime
    except ImportError as error:
        raise MissingExtraError("an ONNX model", "onnxruntime", "onnx") from error
    onnxruntime.disable_telemetry_events()
    return onnxruntime


class OnnxRuntime(Runtime):
    """An ONNX model on ONNX Runtime's CPU back end.

    Args:
        threads: threads per operator; 0 for ONNX Runtime's default.

    Raises:
        MissingExtraError: onnxruntime is not installed.
        ModelError: the file is not an ONNX model.
    """

    kind = "onnx"

    def __init__(self, path: Path, threads: int = 1) -> None:
        runtime = onnxruntime()
        options = runtime.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 3
        with loading(str(path), "ONNX Runtime"):
            self.session = runtime.InferenceSession(
                str(path), options, providers=["CPUExecutionProvider"]
            )
        inputs = [_onnx_spec(node) for node in self.session.get_inputs()]
        outputs = [_onnx_spec(node) for node in self.session.get_outputs()]
        fixed = next((spec.shape[0] for spec in inputs if spec.shape), None)
        super().__init__(path.name, inputs, outputs, fixed)

    def _run(self, inputs: Sequence[Array]) -> list[Array]:
        named = {spec.name: array for spec, array in zip(self.inputs, inputs, strict=True)}
        return [np.asarray(output) for output in self.session.run(None, named)]


def _onnx_spec(node: Any) -> TensorSpec:
    kind = node.type.removeprefix("tensor(").removesuffix(")")
    shape = tuple(size if isinstance(size, int) else None for size in node.shape)
    return TensorSpec(node.name, _ONNX_TYPES.get(kind, kind), shape)


class LiteRT(Runtime):
    """A TensorFlow Lite model on LiteRT's interpreter.

    There is one interpreter per batch size. A model that cannot be resized, such as one with a
    constant shape in a reshape, has a fixed batch.

    Raises:
        MissingExtraError: ai-edge-litert is not installed.
        ModelError: the file is not a TensorFlow Lite model.
    """

    kind = "litert"

    def __init__(self, path: Path, threads: int = 1) -> None:
        try:
            from ai_edge_litert.interpreter import Interpreter
        except ImportError as error:
            raise MissingExtraError("a TensorFlow Lite model", "ai-edge-litert", "edge") from error
        self._make = lambda: Interpreter(model_path=str(path), num_threads=threads or None)
        self._interpreters: dict[int, Any] = {}
        with loading(str(path), "LiteRT"):
            first = self._make()
            first.allocate_tensors()
        inputs = [_litert_spec(detail) for detail in first.get_input_details()]
        outputs = [_litert_spec(detail) for detail in first.get_output_details()]
        batch = inputs[0].shape[0] if inputs and inputs[0].shape else 1
        super().__init__(path.name, inputs, outputs, batch)
        self._interpreters[batch or 1] = first
        if self._can_be_resized(first, (batch or 1) + 1):
            self.fixed_batch = None
            specs = [replace(spec, shape=(None, *spec.shape[1:])) for spec in (*inputs, *outputs)]
            self.inputs, self.outputs = tuple(specs[: len(inputs)]), tuple(specs[len(inputs) :])

    def _can_be_resized(self, first: Any, samples: int) -> bool:
        try:
            other = self._prepared(samples)
            other.invoke()
        except (RuntimeError, ValueError):
            self._interpreters.pop(samples, None)
            return False
        shapes = [detail["shape"] for detail in other.get_output_details()]
        return all(len(shape) and shape[0] == samples for shape in shapes)

    def _prepared(self, samples: int) -> Any:
        if samples not in self._interpreters:
            interpreter = self._make()
            for detail in interpreter.get_input_details():
                shape = [samples, *detail["shape"][1:]]
                interpreter.resize_tensor_input(detail["index"], shape)
            interpreter.allocate_tensors()
            self._interpreters[samples] = interpreter
        return self._interpreters[samples]

    def _run(self, inputs: Sequence[Array]) -> list[Array]:
        interpreter = self._prepared(len(inputs[0]))
        for detail, array in zip(interpreter.get_input_details(), inputs, strict=True):
            try:
                interpreter.set_tensor(detail["index"], array)
            except ValueError as error:
                raise ModelError(f"{self.name} does not accept the input: {error}") from error
        interpreter.invoke()
        return [interpreter.get_tensor(d["index"]) for d in interpreter.get_output_details()]

    def close(self) -> None:
        """Free the interpreters."""
        self._interpreters.clear()


def _litert_spec(detail: Any) -> TensorSpec:
    scale, zero = detail["quantization"]
    shape = tuple(int(size) for size in detail["shape"])
    return TensorSpec(
        detail["name"], np.dtype(detail["dtype"]).name, shape, float(scale), int(zero)
    )
