"""Peers for the same matmul: PyTorch's engines, gemmlowp, ONNX Runtime, OpenVINO.

Each peer is a function without arguments that multiplies once, on one thread, or the reason why it
cannot run here.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

Run = Callable[[], object]
Peer = Run | str


def float32(m: int, n: int, k: int) -> Peer:
    x, layer = torch.randn(m, k), torch.nn.Linear(k, n, bias=False).requires_grad_(False)
    return lambda: layer(x)


def int_mm(m: int, n: int, k: int) -> Peer:
    a = torch.randint(-64, 64, (m, k), dtype=torch.int8)
    b = torch.randint(-64, 64, (k, n), dtype=torch.int8)
    try:
        torch._int_mm(a, b)
    except RuntimeError as error:
        return f"torch._int_mm: {error}"
    return lambda: torch._int_mm(a, b)


def quantized(engine: str, m: int, n: int, k: int, *, dynamic: bool = False) -> Peer:
    """Return PyTorch's quantised linear layer on 8-bit inputs and outputs; floats if `dynamic`."""
    if engine not in torch.backends.quantized.supported_engines:
        return f"this PyTorch has no engine '{engine}'"
    with warnings.catch_warnings(), _engine(engine):
        warnings.simplefilter("ignore")
        w = torch.quantize_per_tensor(torch.randn(n, k), 0.02, 0, torch.qint8)
        packed = torch.ops.quantized.linear_prepack(w, None)
        x = torch.quantize_per_tensor(torch.rand(m, k), 1 / 127, 0, torch.quint8)
    floats = torch.randn(m, k)

    # The engine need not be set for the call, since packed weights belong to an engine.
    if dynamic:
        return lambda: torch.ops.quantized.linear_dynamic(floats, packed, True)
    return lambda: torch.ops.quantized.linear(x, packed, 0.1, 64)


@contextlib.contextmanager
def _engine(name: str) -> Iterator[None]:
    before = torch.backends.quantized.engine
    torch.backends.quantized.engine = name
    try:
        yield
    finally:
        torch.backends.quantized.engine = before


def onnxruntime(bits: int, m: int, n: int, k: int) -> Peer:
    """Return ONNX Runtime's ``MatMulNBits``: weights of 2, 4 or 8 bits in blocks of 32, float data.

    Accuracy level 4: it rounds activations to 8 bits internally, as ours do.
    """
    try:
        import onnx
        import onnxruntime as ort
    except ImportError as error:
        return f"no {error.name} (the extra onnx)"
    helper, kind = onnx.helper, onnx.TensorProto.FLOAT
    draw = np.random.default_rng(0)
    blocks = k // _ORT_BLOCK
    values = draw.integers(0, 255, (n, blocks, _ORT_BLOCK * bits // 8), dtype=np.uint8)
    scales = draw.random((n, blocks), dtype=np.float32)
    node = helper.make_node(
        "MatMulNBits", ["x", "w", "scale"], ["y"], domain="com.microsoft", K=k, N=n, bits=bits,
        block_size=_ORT_BLOCK, accuracy_level=4,
    )  # fmt: skip
    graph = helper.make_graph(
        [node], "product", [helper.make_tensor_value_info("x", kind, [m, k])],
        [helper.make_tensor_value_info("y", kind, [m, n])],
        [onnx.numpy_helper.from_array(values, "w"), onnx.numpy_helper.from_array(scales, "scale")],
    )  # fmt: skip
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    try:
        session = ort.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
    except Exception as error:  # its exceptions have no common base class
        return f"ONNX Runtime: {str(error).splitlines()[0][:200]}"
    x = {"x": draw.random((m, k), dtype=np.float32)}
    return lambda: session.run(None, x)


_ORT_BLOCK = 32
_NO_OPENVINO = "no openvino (pip install openvino)"
_OPENVINO = {"INFERENCE_NUM_THREADS": 1, "PERFORMANCE_HINT": "LATENCY"}

_GEMMLOWP = r"""
#include <cstdint>
#include <tuple>
#include "public/gemmlowp.h"
extern "C" void multiply(const uint8_t* a, const uint8_t* b, int32_t* c, int m, int n, int k) {
  static gemmlowp::GemmContext context;
  context.set_max_num_threads(1);
  gemmlowp::MatrixMap<const uint8_t, gemmlowp::MapOrder::RowMajor> left(a, m, k);
  gemmlowp::MatrixMap<const uint8_t, gemmlowp::MapOrder::ColMajor> right(b, k, n);
  gemmlowp::MatrixMap<int32_t, gemmlowp::MapOrder::ColMajor> result(c, m, n);
  gemmlowp::GemmWithOutputPipeline<uint8_t, int32_t, gemmlowp::DefaultL8R8BitDepthParams>(
      &context, left, right, &result, 0, 0, std::make_tuple());
}
"""


def gemmlowp(m: int, n: int, k: int) -> Peer:
    """Return gemmlowp with its AVX2 kernels, compiled on demand (Debian: libgemmlowp-dev)."""
    named = os.environ.get("SLIPSTREAM_GEMMLOWP", "/usr/include/gemmlowp")
    if not (Path(named) / "public" / "gemmlowp.h").is_file():
        return (
            f"no gemmlowp headers in {named} (Debian: libgemmlowp-dev; or name their folder in "
            "SLIPSTREAM_GEMMLOWP)"
        )
    compiler = shutil.which("g++")
    if compiler is None:
        return "gemmlowp needs g++"
    with tempfile.TemporaryDirectory() as folder:
        source, built = Path(folder) / "peer.cpp", Path(folder) / "peer.so"
        source.write_text(_GEMMLOWP)
        done = subprocess.run(
            [
                *(compiler, "-std=c++14", "-O3", "-mavx2", "-DGEMMLOWP_ENABLE_AVX2", "-w"),
                *("-shared", "-fPIC", "-pthread", f"-I{named}"),
                *(str(source), "-o", str(built)),
            ],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            return f"gemmlowp does not compile: {done.stderr.splitlines()[0][:200]}"
        multiply = ctypes.CDLL(str(built)).multiply
    a = torch.randint(0, 8, (m, k), dtype=torch.uint8)
    b = torch.randint(0, 8, (n, k), dtype=torch.uint8)
    c = torch.empty((n, m), dtype=torch.int32)
    multiply.argtypes = (ctypes.c_void_p,) * 3 + (ctypes.c_int,) * 3
    multiply.restype = None

    def run() -> object:
        multiply(a.data_ptr(), b.data_ptr(), c.data_ptr(), m, n, k)
        return c

    run()
    if not torch.equal(c.T.float(), a.float() @ b.float().T):
        return "gemmlowp gives a wrong product"
    return run


def openvino(bits: int, m: int, n: int, k: int) -> Peer:
    """Return OpenVINO's matmul with weights of 4 or 8 bits in blocks of 32, float data."""
    try:
        import openvino as ov
    except ImportError:
        return _NO_OPENVINO
    ops = ov.opset13
    draw = np.random.default_rng(0)
    shape = (n, k // _ORT_BLOCK, _ORT_BLOCK)
    kind = {4: ov.Type.u4, 8: ov.Type.u8}[bits]
    values = draw.integers(0, 255, n * k * bits // 8, dtype=np.uint8)
    codes = ops.convert(ops.constant(ov.Tensor(values, list(shape), kind)), "f16")
    middle = ops.constant(np.float16(2 ** (bits - 1)))
    scales = ops.constant(draw.random((*shape[:2], 1)).astype(np.float16))
    weight = ops.reshape(ops.multiply(ops.subtract(codes, middle), scales), [n, k], False)
    x = ops.parameter([m, k], ov.Type.f32)
    output = ops.matmul(x, ops.convert(weight, "f32"), False, True)
    compiled = ov.compile_model(ov.Model([output], [x]), "CPU", _OPENVINO)
    request, x_values = compiled.create_infer_request(), draw.random((m, k), dtype=np.float32)
    return lambda: request.infer([x_values], share_inputs=True)


def onnxruntime_network(file: Path, x: torch.Tensor) -> Peer:
    """Return a call of a whole network in an ONNX file with an input ``x``."""
    from slipstream.errors import MissingExtraError
    from slipstream.runtimes.files import OnnxRuntime

    try:
        session = OnnxRuntime(file).session
    except MissingExtraError as error:
        return error.what
    feeds = {"x": x.numpy()}
    return lambda: session.run(None, feeds)[0]


def openvino_network(file: Path, x: torch.Tensor) -> Peer:
    """Return a call of the same file in OpenVINO, in float32 instead of its default bfloat16."""
    try:
        import openvino as ov
    except ImportError:
        return _NO_OPENVINO
    settings = {**_OPENVINO, "INFERENCE_PRECISION_HINT": "f32"}
    request = ov.compile_model(str(file), "CPU", settings).create_infer_request()
    inputs = [x.numpy()]
    return lambda: request.infer(inputs, share_inputs=True)[0]
