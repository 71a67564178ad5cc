"""Record the outputs of a model's layers in torch, ONNX Runtime, LiteRT and tflite-micro.

    tap = open_tap("model.onnx")
    outputs, values = tap.run([x])              # values[n] belongs to tap.layers[n]

Layers are what a deployed model computes: a convolution with its activation counts as one, and
paddings, constants, shapes and quantization do not count. Operators that an optimising runtime
fuses stay fused, so the recorded model is the deployed one.
"""

from __future__ import annotations

import hashlib
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np

from slipstream.errors import InvalidArgumentError, MissingExtraError
from slipstream.runtimes.files import onnxruntime
from slipstream.runtimes.python import TorchRuntime
from slipstream.runtimes.runtime import Array, ModelError, Runtime, loading

# Operators that move, describe or requantize values.
_NO_LAYER = {
    "Cast", "Constant", "ConstantOfShape", "DequantizeLinear", "Dropout", "Flatten", "Gather",
    "Identity", "Pad", "QuantizeLinear", "Reshape", "Shape", "Slice", "Squeeze", "Transpose",
    "Unsqueeze", "Expand", "Split", "Range", "Tile",
    "DEQUANTIZE", "EXPAND_DIMS", "PAD", "PADV2", "QUANTIZE", "RESHAPE", "SHAPE", "SQUEEZE",
    "STRIDED_SLICE", "PACK", "DELEGATE", "SPLIT", "SLICE", "TRANSPOSE",
}  # fmt: skip
_ACTIVATIONS = {"Relu", "Clip", "LeakyRelu", "HardSwish", "HardSigmoid", "Sigmoid", "PRelu"}
_WEIGHTED = {"Conv", "Gemm", "MatMul", "ConvTranspose"}


@dataclass(frozen=True)
class TappedTensor:
    """A recorded tensor of a model.

    Attributes:
        name: the model's name of the tensor, or of the module whose output it is.
        kind: ``input``, ``output``, ``tap``, or the operator.
        shape: shape of a batch; None for a free size.
        scale, zero_point: quantization; scale 0 if the tensor is not quantized.
        channels_last: whether images are [N, H, W, C].
        macs: multiply-accumulates per sample; 0 if there are none or they are unknown.
    """

    name: str
    kind: str
    shape: tuple[int | None, ...] = ()
    scale: float = 0.0
    zero_point: int = 0
    channels_last: bool = False
    macs: int = 0

    def real(self, values: Array) -> Array:
        """Dequantize integer codes to float32; return other values unchanged."""
        if not self.scale or values.dtype.kind not in "iu":
            return values
        return np.float32(self.scale) * (values.astype(np.float32) - np.float32(self.zero_point))

    def codes(self, values: Array, dtype: Any) -> Array:
        """Quantize real values to an integer type, rounded and clipped; return codes unchanged."""
        if not self.scale or values.dtype.kind in "iu":
            return values
        limits = np.iinfo(dtype)
        codes = np.round(values / np.float32(self.scale)) + self.zero_point
        return np.clip(codes, limits.min, limits.max).astype(dtype)

    @classmethod
    def from_dict(cls, described: dict[str, Any]) -> Self:
        """Restore a layer from ``asdict``, ignoring further keys."""
        values = {key: described[key] for key in cls.__dataclass_fields__ if key in described}
        return cls(**{**values, "shape": tuple(values.get("shape", ()))})


class Tap(ABC):
    """A model whose layers are recorded.

    Attributes:
        runtime: ``torch``, ``onnx``, ``litert``, ``micro`` or ``callable``.
        model_hash: hash of the model's file or weights, 16 hexadecimal digits.
        inputs, layers, outputs: in the model's order.
    """

    runtime = ""

    def __init__(
        self, model_hash: str, inputs: Sequence[TappedTensor], layers: Sequence[TappedTensor],
        outputs: Sequence[TappedTensor],
    ) -> None:  # fmt: skip
        self.model_hash = model_hash
        self.inputs, self.layers, self.outputs = tuple(inputs), tuple(layers), tuple(outputs)

    @abstractmethod
    def run(self, inputs: Sequence[Array]) -> tuple[list[Array], list[Array | None]]:
        """Return outputs and each layer's value, quantized if it is; None for a layer not run."""

    @abstractmethod
    def plain(self, inputs: Sequence[Array]) -> list[Array]:
        """Return outputs of the deployed model, without recording."""


def digest(*contents: bytes) -> str:
    """Return a hash of bytes, 16 hexadecimal digits."""
    hasher = hashlib.sha256()
    for content in contents:
        hasher.update(content)
    return hasher.hexdigest()[:16]


def open_tap(model: Any, *, source: Any = None, reference: bool = False, threads: int = 1) -> Tap:
    """Open a model to record its layers.

    Args:
        model: a path to .onnx or .tflite, a torch module, an ONNX Runtime session, a LiteRT or
            tflite-micro interpreter, a `Runtime`, or a function of arrays.
        source: path or contents of the model's file; required for interpreters.
        reference: use ONNX Runtime without optimisations, or LiteRT's reference kernels.
        threads: threads per operator.

    Raises:
        InvalidArgumentError: `model` has another type, or `source` is missing.
        MissingExtraError: the runtime's library is not installed.
        ModelError: the model cannot be loaded.
    """
    kind = f"{type(model).__module__}.{type(model).__qualname__}"
    if kind.startswith(("ai_edge_litert", "tflite_micro")):
        if source is None:
            raise InvalidArgumentError(
                "model", "an interpreter does not contain its model's file",
                remedy='pass it: xray.record("edge.xr", model="model.tflite")',
            )  # fmt: skip
        micro = kind.startswith("tflite_micro")
        content = source if isinstance(source, bytes) else _file(source)
        return MicroTap(content) if micro else LiteRTTap(content, reference, threads)
    if kind.startswith("onnxruntime"):
        file = model._model_path or model._model_bytes or source
        content = file if isinstance(file, bytes) else _file(file)
        return OnnxTap(content, reference, threads, session=None if reference else model)
    if isinstance(model, (str, os.PathLike)):
        content, suffix = _file(model), Path(model).suffix.lower()
        if suffix == ".onnx":
            return OnnxTap(content, reference, threads)
        if suffix == ".tflite":
            return LiteRTTap(content, reference, threads)
        raise InvalidArgumentError("model", f"'{model}' is neither .onnx nor .tflite")
    if hasattr(model, "named_modules") and hasattr(model, "state_dict"):
        return TorchTap(model)
    if isinstance(model, TorchRuntime) and model.positional:
        return TorchTap(model.module)
    if isinstance(model, Runtime):
        return CallableTap(model.run, model.name)
    if callable(model):
        return CallableTap(lambda inputs: model(*inputs), getattr(model, "__name__", "function"))
    raise InvalidArgumentError("model", f"{type(model).__name__} is not a supported model")


def _file(path: Any) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ModelError(f"there is no file '{path}'", remedy="check the path") from error


class CallableTap(Tap):
    """A function, without layers."""

    runtime = "callable"

    def __init__(self, function: Callable[[Sequence[Array]], Any], name: str) -> None:
        super().__init__(digest(name.encode()), (), (), ())
        self._function = function

    def run(self, inputs: Sequence[Array]) -> tuple[list[Array], list[Array | None]]:
        return self.plain(inputs), []

    def plain(self, inputs: Sequence[Array]) -> list[Array]:
        output = self._function(inputs)
        outputs = output if isinstance(output, (list, tuple)) else [output]
        return [np.asarray(array) for array in outputs]


class TorchTap(Tap):
    """Leaf modules of a torch module, recorded by forward hooks.

    `replace`, if set, is called with every leaf's output and returns its replacement, so that a
    layer can run on the values of another model.
    """

    runtime = "torch"

    def __init__(self, module: Any) -> None:
        import torch

        self._torch, self.module = torch, module
        self.replace: Callable[[str, Any, tuple[Any, ...]], Any] | None = None
        self._calls: dict[str, Any] = {}
        self.leaves = {
            name: leaf for name, leaf in module.named_modules() if name and not any(leaf.children())
        }
        tensors = [value.detach().cpu().contiguous() for value in module.state_dict().values()]
        contents = [value.reshape(-1).view(torch.uint8).numpy().tobytes() for value in tensors]
        super().__init__(digest(*contents), (), (), ())

    def run(self, inputs: Sequence[Array]) -> tuple[list[Array], list[Array | None]]:
        self._calls = {}
        handles = [
            leaf.register_forward_hook(self._hook(name))
            for name, leaf in self.leaves.items()
            if type(leaf).__name__ not in _NO_LAYER
        ]
        try:
            outputs = self.plain(inputs)
        finally:
            for handle in handles:
                handle.remove()
        if not self.layers:
            self.layers = tuple(self._layer(name, call) for name, call in self._calls.items())
        return outputs, [
            None if layer.name not in self._calls else _as_array(self._calls[layer.name][1])
            for layer in self.layers
        ]

    def plain(self, inputs: Sequence[Array]) -> list[Array]:
        torch = self._torch
        with torch.inference_mode():
            output = self.module(
                *(value if torch.is_tensor(value) else torch.from_numpy(value) for value in inputs)
            )
        if not torch.is_tensor(output) and hasattr(output, "values"):
            output = tuple(output.values())
        outputs = output if isinstance(output, (tuple, list)) else [output]
        return [_as_array(tensor) for tensor in outputs]

    def _hook(self, name: str) -> Callable[..., Any]:
        def hook(module: Any, inputs: tuple[Any, ...], output: Any) -> Any:
            if not self._torch.is_tensor(output):
                return None
            called, number = name, 2
            while called in self._calls:  # a module that is called several times
                called, number = f"{name}#{number}", number + 1
            self._calls[called] = (module, output)
            return None if self.replace is None else self.replace(called, output, inputs)

        return hook

    def _layer(self, name: str, call: tuple[Any, Any]) -> TappedTensor:
        module, output = call
        weight = getattr(module, "weight", None)
        macs = 0
        if weight is not None and weight.dim() > 1 and not hasattr(module, "num_embeddings"):
            spatial = math.prod(output.shape[2:]) if weight.dim() > 2 else output.numel() // (
                len(output) * output.shape[-1])  # fmt: skip
            macs = weight.numel() * spatial
        return TappedTensor(name, type(module).__name__, (None, *output.shape[1:]), macs=macs)


def _as_array(tensor: Any) -> Array:
    tensor = tensor.detach().cpu()
    if str(tensor.dtype) in ("torch.bfloat16", "torch.float16"):
        tensor = tensor.float()
    return np.asarray(tensor.numpy())


class OnnxTap(Tap):
    """An ONNX model with its layers' tensors as additional outputs."""

    runtime = "onnx"

    def __init__(
        self, content: bytes, reference: bool = False, threads: int = 1, session: Any = None
    ) -> None:
        try:
            import onnx
        except ImportError as error:
            raise MissingExtraError("an ONNX model", "onnx with onnxruntime", "onnx") from error
        onnxruntime()
        with loading("the model", "onnx"):
            self.model = onnx.load_from_string(content)
            shapes = onnx.shape_inference.infer_shapes(self.model)
        self._threads, self._reference = threads, reference
        self._content, self._session = content, session
        self._tapped: Any = None
        self._bound_for: tuple[tuple[int, ...], ...] | None
        self._binding: Any
        self._sized, self._bound_for, self._binding = False, None, None
        self._bound: list[Array] = []
        graph = self.model.graph
        constant = {tensor.name for tensor in graph.initializer}
        self._names = [value.name for value in graph.input if value.name not in constant]
        layers, self.fetched = onnx_layers(graph, shapes.graph)
        infos = {v.name: v for v in (*shapes.graph.value_info, *graph.input, *graph.output)}
        super().__init__(
            digest(content),
            [TappedTensor(name, "input", _onnx_shape(infos.get(name))) for name in self._names],
            layers,
            [TappedTensor(value.name, "output", _onnx_shape(value)) for value in graph.output],
        )

    def run(self, inputs: Sequence[Array]) -> tuple[list[Array], list[Array | None]]:
        """See `Tap.run`; the next run overwrites the layers' values."""
        if self._tapped is None:
            self._tapped = self.session_of(with_outputs(self.model, self.fetched))
        count = len(self.outputs)
        shapes = tuple(array.shape for array in inputs)
        if shapes != self._bound_for:
            fed = dict(zip(self._names, inputs, strict=True))
            values: list[Array] = self._tapped.run(self._fetched_names(), fed)
            if not self._sized:
                pairs = zip(self.layers, values[count:], strict=True)
                self.layers, self._sized = tuple(_sized(*pair) for pair in pairs), True
            # Later runs write to the same memory, since allocating costs more than computing.
            self._binding = self._tapped.io_binding()
            for name, array in zip(self._fetched_names(), values, strict=True):
                self._binding.bind_output(
                    name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data
                )
            self._bound_for, self._bound = shapes, values
        else:
            for name, array in zip(self._names, inputs, strict=True):
                self._binding.bind_cpu_input(name, np.ascontiguousarray(array))
            self._tapped.run_with_iobinding(self._binding)
        outputs = [array.copy() for array in self._bound[:count]]
        return outputs, list(self._bound[count:])

    def plain(self, inputs: Sequence[Array]) -> list[Array]:
        if self._session is None:
            self._session = self.session_of(None)
        fed = dict(zip(self._names, inputs, strict=True))
        outputs: list[Array] = self._session.run(None, fed)
        return outputs

    def session_of(self, model: Any = None, profile: str = "") -> Any:
        """Create a session with this model's options.

        Args:
            model: an edited copy of the model; None for the model itself.
            profile: path prefix of a profile of operators; empty for none.
        """
        runtime = onnxruntime()
        options = runtime.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = self._threads, 1
        options.log_severity_level = 3
        if self._reference:
            level = runtime.GraphOptimizationLevel.ORT_DISABLE_ALL
            options.graph_optimization_level = level
        if profile:
            options.enable_profiling, options.profile_file_prefix = True, profile
        content = self._content if model is None else model.SerializeToString()
        with loading("the model", "ONNX Runtime"):
            return runtime.InferenceSession(content, options, providers=["CPUExecutionProvider"])

    def _fetched_names(self) -> list[str]:
        return [*(output.name for output in self.outputs), *self.fetched]


def with_outputs(model: Any, names: Sequence[str]) -> Any:
    """Copy an ONNX model with these tensors as additional outputs."""
    import onnx

    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    present = {output.name for output in copy.graph.output}
    copy.graph.output.extend(
        onnx.helper.make_empty_tensor_value_info(name) for name in names if name not in present
    )
    return copy


def onnx_layers(graph: Any, shapes: Any) -> tuple[list[TappedTensor], list[str]]:
    """Return the layers of an ONNX graph, and for each the tensor to fetch: its codes if quantized.

    `TappedTensor.macs` counts one position of the output until the shape is known.

    Args:
        shapes: the same graph with inferred shapes.
    """
    from onnx import numpy_helper

    weights = {tensor.name: tensor for tensor in graph.initializer}
    for node in graph.node:
        if node.op_type == "Constant" and node.attribute and node.attribute[0].HasField("t"):
            weights[node.output[0]] = node.attribute[0].t
    users: dict[str, list[Any]] = {}
    makers = {name: node for node in graph.node for name in node.output}
    for node in graph.node:
        for name in node.input:
            users.setdefault(name, []).append(node)
    infos = {value.name: value for value in (*shapes.value_info, *shapes.output)}
    live = {value.name for value in graph.input if value.name not in weights}
    layers, fetched = [], []
    macs = 0
    for node in graph.node:
        if not any(name in live for name in node.input):
            continue
        if node.op_type in ("Shape", "Size"):
            continue  # shape arithmetic is not a layer
        live.update(node.output)
        if node.op_type in _NO_LAYER or not node.output:
            continue
        name = node.output[0]
        macs += _weights_of(node, weights, makers)
        after = users.get(name, [])
        fused = len(after) == 1 and after[0].op_type in _ACTIVATIONS and node.op_type in _WEIGHTED
        if fused:
            continue  # the activation's output represents both
        quantised = len(after) == 1 and after[0].op_type == "QuantizeLinear"
        scale, zero, fetch = 0.0, 0, name
        if quantised and after[0].input[1] in weights:
            fetch = after[0].output[0]
            scale = float(numpy_helper.to_array(weights[after[0].input[1]]))
            third = after[0].input[2] if len(after[0].input) > 2 else ""
            zero = int(numpy_helper.to_array(weights[third])) if third in weights else 0
        shape = _onnx_shape(infos.get(name))
        layers.append(TappedTensor(name, node.op_type, shape, scale, zero, macs=macs))
        fetched.append(fetch)
        macs = 0
    return layers, fetched


def _onnx_shape(info: Any) -> tuple[int | None, ...]:
    if info is None or not info.type.tensor_type.HasField("shape"):
        return ()
    sizes = info.type.tensor_type.shape.dim
    return tuple(size.dim_value if size.HasField("dim_value") else None for size in sizes)


def _weights_of(node: Any, weights: Any, makers: Any) -> int:
    """Return the number of weights per position of a node's output; 0 without weights."""
    if node.op_type not in _WEIGHTED:
        return 0
    weight = node.input[1]
    while weight not in weights and weight in makers and makers[weight].input:
        weight = makers[weight].input[0]  # through dequantization
    return math.prod(map(int, weights[weight].dims)) if weight in weights else 0


def _sized(layer: TappedTensor, value: Array) -> TappedTensor:
    """Set a layer's shape from its value, and its multiplications for all positions."""
    positions = value.shape[1:-1] if layer.kind == "MatMul" else value.shape[2:]
    shape = (None, *value.shape[1:])
    return replace(layer, shape=shape, macs=layer.macs * math.prod(positions))


class LiteRTTap(Tap):
    """A TensorFlow Lite model on LiteRT with all tensors preserved, also those in a delegate."""

    runtime = "litert"

    def __init__(self, content: bytes, reference: bool = False, threads: int = 1) -> None:
        try:
            from ai_edge_litert.interpreter import Interpreter, OpResolverType
        except ImportError as error:
            raise MissingExtraError("a TensorFlow Lite model", "ai-edge-litert", "edge") from error
        kernels = OpResolverType.BUILTIN_REF if reference else OpResolverType.AUTO

        def make(preserve: bool, kernels: Any = kernels) -> Any:
            interpreter = Interpreter(
                model_content=content, num_threads=threads, experimental_op_resolver_type=kernels,
                experimental_preserve_all_tensors=preserve,
            )  # fmt: skip
            interpreter.allocate_tensors()
            return interpreter

        self._make, self._plain, self.content = make, None, content
        with loading("the model", "LiteRT"):
            # Without a delegate, which would appear as a single operator.
            plain = make(True, OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES)
            self._tapped = make(True)
        if not hasattr(plain, "_get_ops_details"):
            raise ModelError("this version of ai-edge-litert does not list a model's operators")
        details = {detail["index"]: detail for detail in plain.get_tensor_details()}
        self.operators = [
            operator for operator in plain._get_ops_details()
            if len(operator["outputs"]) and operator["op_name"] not in _NO_LAYER
        ]  # fmt: skip
        self.indices = [int(operator["outputs"][0]) for operator in self.operators]
        super().__init__(
            digest(content),
            [_litert_layer(detail, "input", 0) for detail in plain.get_input_details()],
            [
                _litert_layer(details[index], operator["op_name"], _litert_macs(operator, details))
                for index, operator in zip(self.indices, self.operators, strict=True)
            ],
            [_litert_layer(detail, "output", 0) for detail in plain.get_output_details()],
        )

    def coded(self, inputs: Sequence[Array]) -> list[Array]:
        """Quantize real inputs if the model's inputs are quantized."""
        details = self._tapped.get_input_details()
        return [
            layer.codes(array, detail["dtype"])
            for layer, detail, array in zip(self.inputs, details, inputs, strict=True)
        ]

    def run(self, inputs: Sequence[Array]) -> tuple[list[Array], list[Array | None]]:
        outputs = _invoke(self._tapped, inputs)
        return outputs, [self._tapped.get_tensor(index) for index in self.indices]

    def plain(self, inputs: Sequence[Array]) -> list[Array]:
        if self._plain is None:
            self._plain = self._make(False)
        return _invoke(self._plain, inputs)


def _invoke(interpreter: Any, inputs: Sequence[Array]) -> list[Array]:
    for detail, array in zip(interpreter.get_input_details(), inputs, strict=True):
        if tuple(detail["shape"]) != array.shape:
            raise ModelError(
                f"the model takes an input of {list(detail['shape'])}, not {list(array.shape)}",
                remedy="record a TensorFlow Lite model with its own input shapes",
            )
        interpreter.set_tensor(detail["index"], np.ascontiguousarray(array, detail["dtype"]))
    interpreter.invoke()
    return [interpreter.get_tensor(detail["index"]) for detail in interpreter.get_output_details()]


def _litert_layer(detail: Any, kind: str, macs: int) -> TappedTensor:
    scales = detail["quantization_parameters"]["scales"]
    scale, zero = detail["quantization"] if len(scales) == 1 else (0.0, 0)
    shape = tuple(int(size) for size in detail["shape"])
    return TappedTensor(detail["name"], kind, shape, float(scale), int(zero), len(shape) > 2, macs)


def _litert_macs(operator: Any, details: Any) -> int:
    if operator["op_name"] not in ("CONV_2D", "DEPTHWISE_CONV_2D", "FULLY_CONNECTED"):
        return 0
    weight = math.prod(int(size) for size in details[int(operator["inputs"][1])]["shape"])
    shape = [int(size) for size in details[int(operator["outputs"][0])]["shape"]]
    return weight * (math.prod(shape[1:3]) if len(shape) == 4 else 1)


class MicroTap(LiteRTTap):
    """The same model on tflite-micro's interpreter."""

    runtime = "micro"

    def __init__(self, content: bytes) -> None:
        super().__init__(content)
        try:
            from tflite_micro.python.tflite_micro import runtime
        except ImportError as error:
            raise MissingExtraError("tflite-micro", "tflite-micro", "edge") from error
        with loading("the model", "tflite-micro"):
            self._micro = runtime.Interpreter.from_bytes(
                content, arena_size=max(len(content) * 20, 1 << 20),
                intrepreter_config=runtime.InterpreterConfig.kPreserveAllTensors,
            )  # fmt: skip

    def run(self, inputs: Sequence[Array]) -> tuple[list[Array], list[Array | None]]:
        outputs = self.plain(inputs)
        return outputs, [self._micro.GetTensor(index, 0)["tensor_data"] for index in self.indices]

    def plain(self, inputs: Sequence[Array]) -> list[Array]:
        for number, array in enumerate(inputs):
            self._micro.set_input(array, number)
        self._micro.invoke()
        return [np.array(self._micro.get_output(number)) for number in range(len(self.outputs))]
