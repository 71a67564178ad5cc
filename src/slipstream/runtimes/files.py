"""Models in files: ONNX Runtime and LiteRT."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.errors import MissingExtraError
from slipstream.runtimes.runtime import Array, ModelError, Runtime, TensorSpec, loading

_ONNX_TYPES = {"float": "float32", "double": "float64"}


def onnxruntime() -> Any:
    """ONNX Runtime, which sends nothing and writes no device id.

    Raises:
        MissingExtraError: it is not installed.
    """
    # Obeyed at its import alone: what the function below turns off is only later events.
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    try:
        import onnxruntime
    except ImportError as error:
        raise MissingExtraError("an ONNX model", "onnxruntime", "onnx") from error
    onnxruntime.disable_telemetry_events()
    return onnxruntime


class OnnxRuntime(Runtime):
    """An ONNX model on ONNX Runtime's processor back end.

    Args:
        threads: inside an operator; 0 for what ONNX Runtime takes by itself.

    Raises:
        MissingExtraError: onnxruntime is not installed.
        ModelError: it is no ONNX model.
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
        inputs = [_onnx_spec(one) for one in self.session.get_inputs()]
        outputs = [_onnx_spec(one) for one in self.session.get_outputs()]
        fixed = next((one.shape[0] for one in inputs if one.shape), None)
        super().__init__(path.name, inputs, outputs, fixed)

    def _run(self, inputs: Sequence[Array]) -> list[Array]:
        named = {spec.name: array for spec, array in zip(self.inputs, inputs, strict=True)}
        return [np.asarray(output) for output in self.session.run(None, named)]


def _onnx_spec(one: Any) -> TensorSpec:
    kind = one.type.removeprefix("tensor(").removesuffix(")")
    shape = tuple(size if isinstance(size, int) else None for size in one.shape)
    return TensorSpec(one.name, _ONNX_TYPES.get(kind, kind), shape)


class LiteRT(Runtime):
    """A TensorFlow Lite model on LiteRT's interpreter.

    An interpreter is prepared for one number of samples; one is kept for every number that came.
    Where a model cannot be resized (a reshape with a number in it), its own is the fixed batch.

    Raises:
        MissingExtraError: ai-edge-litert is not installed.
        ModelError: it is no TensorFlow Lite model.
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
        inputs = [_litert_spec(one) for one in first.get_input_details()]
        outputs = [_litert_spec(one) for one in first.get_output_details()]
        batch = inputs[0].shape[0] if inputs and inputs[0].shape else 1
        super().__init__(path.name, inputs, outputs, batch)
        self._interpreters[batch or 1] = first
        if self._can_be_resized(first, (batch or 1) + 1):
            self.fixed_batch = None
            free = [(None, *spec.shape[1:]) for spec in (*inputs, *outputs)]
            specs = [
                TensorSpec(spec.name, spec.dtype, shape, spec.scale, spec.zero_point)
                for spec, shape in zip((*inputs, *outputs), free, strict=True)
            ]
            self.inputs, self.outputs = tuple(specs[: len(inputs)]), tuple(specs[len(inputs) :])

    def _can_be_resized(self, first: Any, samples: int) -> bool:
        try:
            other = self._prepared(samples)
            other.invoke()
        except (RuntimeError, ValueError):
            self._interpreters.pop(samples, None)
            return False
        shapes = [one["shape"] for one in other.get_output_details()]
        return all(len(shape) and shape[0] == samples for shape in shapes)

    def _prepared(self, samples: int) -> Any:
        if samples not in self._interpreters:
            interpreter = self._make()
            for one in interpreter.get_input_details():
                interpreter.resize_tensor_input(one["index"], [samples, *one["shape"][1:]])
            interpreter.allocate_tensors()
            self._interpreters[samples] = interpreter
        return self._interpreters[samples]

    def _run(self, inputs: Sequence[Array]) -> list[Array]:
        interpreter = self._prepared(len(inputs[0]))
        for one, array in zip(interpreter.get_input_details(), inputs, strict=True):
            try:
                interpreter.set_tensor(one["index"], array)
            except ValueError as error:
                raise ModelError(f"{self.name} does not take it: {error}") from error
        interpreter.invoke()
        return [interpreter.get_tensor(one["index"]) for one in interpreter.get_output_details()]

    def close(self) -> None:
        """Free the interpreters."""
        self._interpreters.clear()


def _litert_spec(one: Any) -> TensorSpec:
    scale, zero = one["quantization"]
    shape = tuple(int(size) for size in one["shape"])
    return TensorSpec(one["name"], np.dtype(one["dtype"]).name, shape, float(scale), int(zero))
