"""Models that tell what their layers give: torch, ONNX Runtime, LiteRT, tflite-micro.

    tap = open_tap("model.onnx")
    outputs, values = tap.run([x])              # values[n] belongs to tap.layers[n]

A layer is something a deployed model still has: a convolution together with its activation,
not paddings, constants, shapes or the codes between them. What an optimising runtime fuses stays
fused, so that what is seen is what is deployed.
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
from slipstream.runtimes.runtime import Array, ModelError, Runtime, loading

# What moves, describes or recodes values and computes none.
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
class Layer:
    """A tensor of a model that is recorded.

    Attributes:
        name: the model's own name of the tensor, or of the module that gives it.
        kind: ``input``, ``output``, ``tap``, or the operator.
        shape: of one batch as the model says it; None where it is free.
        scale, zero_point: of codes; scale 0 where numbers stand for themselves.
        channels_last: whether images are [N, H, W, C].
        macs: multiplications of one sample; 0 where nothing is known or there are none.
    """

    name: str
    kind: str
    shape: tuple[int | None, ...] = ()
    scale: float = 0.0
    zero_point: int = 0
    channels_last: bool = False
    macs: int = 0

    def real(self, values: Array) -> Array:
        """Codes as what they stand for, float32; other numbers as they are."""
        if not self.scale or values.dtype.kind not in "iu":
            return values
        return np.float32(self.scale) * (values.astype(np.float32) - np.float32(self.zero_point))

    def codes(self, values: Array, dtype: Any) -> Array:
        """Real numbers as codes of an integer type, rounded and cut off; other numbers as they
        are."""
        if not self.scale or values.dtype.kind in "iu":
            return values
        limits = np.iinfo(dtype)
        codes = np.round(values / np.float32(self.scale)) + self.zero_point
        return np.clip(codes, limits.min, limits.max).astype(dtype)

    @classmethod
    def from_dict(cls, described: dict[str, Any]) -> Self:
        """What ``asdict`` made of one, further keys ignored."""
        given = {key: described[key] for key in cls.__dataclass_fields__ if key in described}
        return cls(**{**given, "shape": tuple(given.get("shape", ()))})


class Tap(ABC):
    """A model whose layers can be seen.

    Attributes:
        runtime: ``torch``, ``onnx``, ``litert``, ``micro`` or ``callable``.
        model_hash: 16 hexadecimal digits of the model's file or weights.
        inputs, layers, outputs: in the order the model has them.
    """

    runtime = ""

    def __init__(
        self, model_hash: str, inputs: Sequence[Layer], layers: Sequence[Layer],
        outputs: Sequence[Layer],
    ) -> None:  # fmt: skip
        self.model_hash = model_hash
        self.inputs, self.layers, self.outputs = tuple(inputs), tuple(layers), tuple(outputs)

    @abstractmethod
    def run(self, inputs: Sequence[Array]) -> tuple[list[Array], list[Array | None]]:
        """Outputs, and what each layer gave, as codes where it gives codes; None if it was not
        run."""

    @abstractmethod
    def plain(self, inputs: Sequence[Array]) -> list[Array]:
        """Outputs of the model as it is deployed, nothing recorded."""


def digest(*contents: bytes) -> str:
    """16 hexadecimal digits of bytes."""
    hasher = hashlib.sha256()
    for content in contents:
        hasher.update(content)
    return hasher.hexdigest()[:16]


def open_tap(model: Any, *, source: Any = None, reference: bool = False, threads: int = 1) -> Tap:
    """A model with its layers to be seen.

    Args:
        model: a path to .onnx or .tflite, a torch module, an ONNX Runtime session, a LiteRT or
            tflite-micro interpreter, a `Runtime`, or a function of arrays.
        source: path or contents of the model's file, where `model` does not know it: interpreters.
        reference: on plain kernels: ONNX Runtime without optimisations, LiteRT's reference kernels.
        threads: inside an operator.

    Raises:
        InvalidArgumentError: `model` is none of these, or `source` is needed.
        MissingExtraError: the runtime's library is not installed.
        ModelError: the model cannot be loaded.
    """
    kind = f"{type(model).__module__}.{type(model).__qualname__}"
    if kind.startswith(("ai_edge_litert", "tflite_micro")):
        if source is None:
            raise InvalidArgumentError(
                "model", "an interpreter does not know the model it was made of",
                remedy='name it: xray.record("edge.xr", model="model.tflite")',
            )  # fmt: skip
        micro = kind.startswith("tflite_micro")
        content = source if isinstance(source, bytes) else _file(source)
        return MicroTap(content) if micro else LiteRTTap(content, reference, threads)
    if kind.startswith("onnxruntime"):
        known = model._model_path or model._model_bytes or source
        content = known if isinstance(known, bytes) else _file(known)
        return OnnxTap(content, reference, threads, session=None if reference else model)
    if isinstance(model, (str, os.PathLike)):
        content, ending = _file(model), Path(model).suffix.lower()
        if ending == ".onnx":
            return OnnxTap(content, reference, threads)
        if ending == ".tflite":
            return LiteRTTap(content, reference, threads)
        raise InvalidArgumentError("model", f"'{model}' is neither .onnx nor .tflite")
    if hasattr(model, "named_modules") and hasattr(model, "state_dict"):
        return TorchTap(model)
    if isinstance(model, Runtime):
        module = getattr(model, "_module", None)
        return CallableTap(model.run, model.name) if module is None else TorchTap(module)
    if callable(model):
        return CallableTap(lambda inputs: model(*inputs), getattr(model, "__name__", "function"))
    raise InvalidArgumentError("model", f"{type(model).__name__} is no model that is known here")


def _file(path: Any) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ModelError(f"there is no file '{path}'", remedy="check the path") from error


class CallableTap(Tap):
    """A function: its inputs and outputs, no layers."""

    runtime = "callable"

    def __init__(self, function: Callable[[Sequence[Array]], Any], name: str) -> None:
        super().__init__(digest(name.encode()), (), (), ())
        self._function = function

    def run(self, inputs: Sequence[Array]) -> tuple[list[Array], list[Array | None]]:
        return self.plain(inputs), []

    def plain(self, inputs: Sequence[Array]) -> list[Array]:
        given = self._function(inputs)
        return [np.asarray(one) for one in (given if isinstance(given, (list, tuple)) else [given])]


class TorchTap(Tap):
    """Leaf modules of a torch module, by forward hooks.

    `replace`, if set, is asked for every leaf's output, and what it returns takes its place: so a
    layer can be run on what another model's layers gave.
    """

    runtime = "torch"

    def __init__(self, module: Any) -> None:
        import torch

        self._torch, self.module = torch, module
        self.replace: Callable[[str, Any, tuple[Any, ...]], Any] | None = None
        self._found: dict[str, Any] = {}
        self.leaves = {
            name: one for name, one in module.named_modules() if name and not any(one.children())
        }
        tensors = [one.detach().cpu().contiguous() for one in module.state_dict().values()]
        contents = [one.reshape(-1).view(torch.uint8).numpy().tobytes() for one in tensors]
        super().__init__(digest(*contents), (), (), ())

    def run(self, inputs: Sequence[Array]) -> tuple[list[Array], list[Array | None]]:
        self._found = {}
        handles = [
            one.register_forward_hook(self._hook(name))
            for name, one in self.leaves.items()
            if type(one).__name__ not in _NO_LAYER
        ]
        try:
            outputs = self.plain(inputs)
        finally:
            for handle in handles:
                handle.remove()
        if not self.layers:
            self.layers = tuple(self._layer(name, one) for name, one in self._found.items())
        return outputs, [
            None if layer.name not in self._found else _as_array(self._found[layer.name][1])
            for layer in self.layers
        ]

    def plain(self, inputs: Sequence[Array]) -> list[Array]:
        torch = self._torch
        with torch.inference_mode():
            given = self.module(
                *(one if torch.is_tensor(one) else torch.from_numpy(one) for one in inputs)
            )
        if not torch.is_tensor(given) and hasattr(given, "values"):
            given = tuple(given.values())
        return [_as_array(one) for one in (given if isinstance(given, (tuple, list)) else [given])]

    def _hook(self, name: str) -> Callable[..., Any]:
        def hook(module: Any, inputs: tuple[Any, ...], output: Any) -> Any:
            if not self._torch.is_tensor(output):
                return None
            called, number = name, 2
            while called in self._found:  # a module that is used several times
                called, number = f"{name}#{number}", number + 1
            self._found[called] = (module, output)
            return None if self.replace is None else self.replace(called, output, inputs)

        return hook

    def _layer(self, name: str, found: tuple[Any, Any]) -> Layer:
        module, output = found
        weight = getattr(module, "weight", None)
        macs = 0
        if weight is not None and weight.dim() > 1 and not hasattr(module, "num_embeddings"):
            spatial = math.prod(output.shape[2:]) if weight.dim() > 2 else output.numel() // (
                len(output) * output.shape[-1])  # fmt: skip
            macs = weight.numel() * spatial
        return Layer(name, type(module).__name__, (None, *output.shape[1:]), macs=macs)


def _as_array(tensor: Any) -> Array:
    tensor = tensor.detach().cpu()
    if str(tensor.dtype) in ("torch.bfloat16", "torch.float16"):
        tensor = tensor.float()
    return np.asarray(tensor.numpy())


class OnnxTap(Tap):
    """An ONNX model, what its layers give added to its outputs."""

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
        self._given: list[Array] = []
        graph = self.model.graph
        self._names = [one.name for one in graph.input]
        constant = {one.name for one in graph.initializer}
        self._names = [name for name in self._names if name not in constant]
        layers, self.fetched = onnx_layers(graph, shapes.graph)
        known = {one.name: one for one in (*shapes.graph.value_info, *graph.input, *graph.output)}
        super().__init__(
            digest(content),
            [Layer(name, "input", _onnx_shape(known.get(name))) for name in self._names],
            layers,
            [Layer(one.name, "output", _onnx_shape(one)) for one in graph.output],
        )

    def run(self, inputs: Sequence[Array]) -> tuple[list[Array], list[Array | None]]:
        """As of `Tap`; what layers gave is overwritten by the next run."""
        if self._tapped is None:
            self._tapped = self.session_of(with_outputs(self.model, self.fetched))
        count = len(self.outputs)
        shapes = tuple(one.shape for one in inputs)
        if shapes != self._bound_for:
            fed = dict(zip(self._names, inputs, strict=True))
            given: list[Array] = self._tapped.run(self._wanted(), fed)
            if not self._sized:
                pairs = zip(self.layers, given[count:], strict=True)
                self.layers, self._sized = tuple(_sized(*pair) for pair in pairs), True
            # From now on into the same memory: new memory costs more than what is computed.
            self._binding = self._tapped.io_binding()
            for name, array in zip(self._wanted(), given, strict=True):
                self._binding.bind_output(
                    name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data
                )
            self._bound_for, self._given = shapes, given
        else:
            for name, array in zip(self._names, inputs, strict=True):
                self._binding.bind_cpu_input(name, np.ascontiguousarray(array))
            self._tapped.run_with_iobinding(self._binding)
        outputs = [one.copy() for one in self._given[:count]]
        return outputs, list(self._given[count:])

    def plain(self, inputs: Sequence[Array]) -> list[Array]:
        if self._session is None:
            self._session = self.session_of(None)
        given: list[Array] = self._session.run(None, dict(zip(self._names, inputs, strict=True)))
        return given

    def session_of(self, model: Any = None, profile: str = "") -> Any:
        """A session as this model's own, of an edited copy of it; of itself if None.

        Args:
            profile: where it writes the times of operators; empty for no profile.
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

    def _wanted(self) -> list[str]:
        return [*(one.name for one in self.outputs), *self.fetched]


def with_outputs(model: Any, names: Sequence[str]) -> Any:
    """A copy of an ONNX model that gives these tensors, too."""
    import onnx

    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    known = {one.name for one in copy.graph.output}
    copy.graph.output.extend(
        onnx.helper.make_empty_tensor_value_info(name) for name in names if name not in known
    )
    return copy


def onnx_layers(graph: Any, shapes: Any) -> tuple[list[Layer], list[str]]:
    """The layers of an ONNX graph, and for each the tensor to fetch: its codes where it has them.

    `Layer.macs` are those of one place of its output until its shape is known.

    Args:
        shapes: the same graph with shapes inferred.
    """
    from onnx import numpy_helper

    weights = {one.name: one for one in graph.initializer}
    for node in graph.node:
        if node.op_type == "Constant" and node.attribute and node.attribute[0].HasField("t"):
            weights[node.output[0]] = node.attribute[0].t
    users: dict[str, list[Any]] = {}
    makers = {name: node for node in graph.node for name in node.output}
    for node in graph.node:
        for name in node.input:
            users.setdefault(name, []).append(node)
    known = {one.name: one for one in (*shapes.value_info, *shapes.output)}
    live = {one.name for one in graph.input if one.name not in weights}
    layers, fetched = [], []
    so_far = 0
    for node in graph.node:
        if not any(name in live for name in node.input):
            continue
        if node.op_type in ("Shape", "Size"):
            continue  # what is computed of shapes is no layer
        live.update(node.output)
        if node.op_type in _NO_LAYER or not node.output:
            continue
        name = node.output[0]
        so_far += _weights_of(node, weights, makers)
        after = users.get(name, [])
        fused = len(after) == 1 and after[0].op_type in _ACTIVATIONS and node.op_type in _WEIGHTED
        if fused:
            continue  # the activation's output stands for both
        quantised = len(after) == 1 and after[0].op_type == "QuantizeLinear"
        scale, zero, fetch = 0.0, 0, name
        if quantised and after[0].input[1] in weights:
            fetch = after[0].output[0]
            scale = float(numpy_helper.to_array(weights[after[0].input[1]]))
            third = after[0].input[2] if len(after[0].input) > 2 else ""
            zero = int(numpy_helper.to_array(weights[third])) if third in weights else 0
        layers.append(
            Layer(name, node.op_type, _onnx_shape(known.get(name)), scale, zero, macs=so_far)
        )
        fetched.append(fetch)
        so_far = 0
    return layers, fetched


def _onnx_shape(info: Any) -> tuple[int | None, ...]:
    if info is None or not info.type.tensor_type.HasField("shape"):
        return ()
    sizes = info.type.tensor_type.shape.dim
    return tuple(one.dim_value if one.HasField("dim_value") else None for one in sizes)


def _weights_of(node: Any, weights: Any, makers: Any) -> int:
    """How many weights a node multiplies each place of its output with; 0 if it has none."""
    if node.op_type not in _WEIGHTED:
        return 0
    weight = node.input[1]
    while weight not in weights and weight in makers and makers[weight].input:
        weight = makers[weight].input[0]  # through what restores a weight from its codes
    return math.prod(int(one) for one in weights[weight].dims) if weight in weights else 0


def _sized(layer: Layer, value: Array) -> Layer:
    """A layer with the shape it had, and the multiplications of all places of it."""
    places = value.shape[1:-1] if layer.kind == "MatMul" else value.shape[2:]
    shape = (None, *value.shape[1:])
    return replace(layer, shape=shape, macs=layer.macs * math.prod(places))


class LiteRTTap(Tap):
    """A TensorFlow Lite model on LiteRT with every tensor preserved.

    Operators that a delegate has taken over are seen through their tensors, which are preserved.
    """

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
            # Without a delegate: with one, its operators would be a single one.
            plain = make(True, OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES)
            self._tapped = make(True)
        if not hasattr(plain, "_get_ops_details"):
            raise ModelError("this version of ai-edge-litert does not tell its operators")
        details = {one["index"]: one for one in plain.get_tensor_details()}
        self.operators = [
            one for one in plain._get_ops_details()
            if len(one["outputs"]) and one["op_name"] not in _NO_LAYER
        ]  # fmt: skip
        self.indices = [int(one["outputs"][0]) for one in self.operators]
        super().__init__(
            digest(content),
            [_litert_layer(one, "input", 0) for one in plain.get_input_details()],
            [
                _litert_layer(details[index], one["op_name"], _litert_macs(one, details))
                for index, one in zip(self.indices, self.operators, strict=True)
            ],
            [_litert_layer(one, "output", 0) for one in plain.get_output_details()],
        )

    def coded(self, inputs: Sequence[Array]) -> list[Array]:
        """Inputs as the model takes them: real numbers as codes, where it takes codes."""
        details = self._tapped.get_input_details()
        return [
            layer.codes(one, detail["dtype"])
            for layer, detail, one in zip(self.inputs, details, inputs, strict=True)
        ]

    def run(self, inputs: Sequence[Array]) -> tuple[list[Array], list[Array | None]]:
        outputs = _invoke(self._tapped, inputs)
        return outputs, [self._tapped.get_tensor(index) for index in self.indices]

    def plain(self, inputs: Sequence[Array]) -> list[Array]:
        if self._plain is None:
            self._plain = self._make(False)
        return _invoke(self._plain, inputs)


def _invoke(interpreter: Any, inputs: Sequence[Array]) -> list[Array]:
    for one, array in zip(interpreter.get_input_details(), inputs, strict=True):
        if tuple(one["shape"]) != array.shape:
            raise ModelError(
                f"it takes {list(one['shape'])} and was given {list(array.shape)}",
                remedy="a TensorFlow Lite model is recorded with the shapes it was made for",
            )
        interpreter.set_tensor(one["index"], np.ascontiguousarray(array, one["dtype"]))
    interpreter.invoke()
    return [interpreter.get_tensor(one["index"]) for one in interpreter.get_output_details()]


def _litert_layer(one: Any, kind: str, macs: int) -> Layer:
    scales = one["quantization_parameters"]["scales"]
    scale, zero = one["quantization"] if len(scales) == 1 else (0.0, 0)
    shape = tuple(int(size) for size in one["shape"])
    return Layer(one["name"], kind, shape, float(scale), int(zero), len(shape) > 2, macs)


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
