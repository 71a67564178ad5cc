"""Reading .tflite files: contents of valid files, and errors for damaged ones."""

from __future__ import annotations

import resource
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from models import FLOAT, INT8, MICRO_SPEECH, mutants, need_runtimes
from random_networks import RandomNetwork

from slipstream.ship import ModelFileError, UnsupportedModelError
from slipstream.ship.export import write_network
from slipstream.ship.firmware import (
    Network,
    Operator,
    Quantization,
    Tensor,
    export_firmware,
    forecast,
    lower,
    parse_network,
    read_network,
)
from slipstream.ship.firmware.tflite import CODES


def test_operator_codes_match_the_schema(require: Callable[[str, bool, str], None]) -> None:
    need_runtimes(require)
    from ai_edge_litert.schema_py_generated import BuiltinOperator

    schema = {name.lower(): code for name, code in vars(BuiltinOperator).items() if name[0] != "_"}
    assert {name: schema.get(name) for name in CODES} == CODES


@pytest.mark.parametrize("name", INT8)
def test_tensors_match_litert(
    name: str, shared_data: Path, require: Callable[[str, bool, str], None]
) -> None:
    need_runtimes(require)
    from ai_edge_litert.schema_py_generated import ModelT

    data = (shared_data / name).read_bytes()
    graph = ModelT.InitFromPackedBuf(data, 0).subgraphs[0]
    network = parse_network(data)
    assert [list(tensor.shape) for tensor in network.tensors] == [
        t.shape.tolist() for t in graph.tensors
    ]
    assert [tensor.name.encode() for tensor in network.tensors] == [t.name for t in graph.tensors]
    assert [list(operator.inputs) for operator in network.operators] == [
        o.inputs.tolist() for o in graph.operators
    ]
    for ours, theirs in zip(network.tensors, graph.tensors, strict=True):
        scales = theirs.quantization.scale if theirs.quantization else None
        found = ours.quantization
        assert np.array_equal(
            [] if found is None else found.scales, [] if scales is None else scales
        )


@pytest.mark.parametrize("name", FLOAT)
def test_refuses_float_models_with_all_their_operators(name: str, shared_data: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="float32") as refused:
        lower(read_network(shared_data / name))
    assert "fully_connected" in refused.value.operators


def test_lists_all_unsupported_operators(shared_data: Path) -> None:
    with pytest.raises(UnsupportedModelError) as refused:
        lower(read_network(shared_data / "mcu/keyword_scrambled_8bit.tflite"))
    assert refused.value.operators == ("quantize", "softmax", "svdf")


def test_refuses_truncated_files(shared_data: Path) -> None:
    data = (shared_data / MICRO_SPEECH).read_bytes()
    for end in (*range(8, 2000, 7), *range(2000, len(data) - 16, 997)):
        with pytest.raises((ModelFileError, UnsupportedModelError)):
            lower(parse_network(data[:end]))


@contextmanager
def memory_limit(mebibytes: int) -> Iterator[None]:
    """Allow `mebibytes` more memory than is in use now."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + (mebibytes << 20), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def ship(data: bytes) -> str:
    """Export firmware of both kinds and a forecast; return "ok" or the name of the error."""
    try:
        firmware = export_firmware(data)
        assert firmware.sources
        assert firmware.to_json()
        assert firmware.tables()
        assert forecast(firmware).tables()
        assert export_firmware(data, backend="interpreter").sources
    except (ModelFileError, UnsupportedModelError) as refused:
        return type(refused).__name__
    return "ok"


def shipped(model: bytes, count: int, seed: int) -> Counter[str]:
    with memory_limit(256):
        return Counter(map(ship, mutants(model, count, seed, ((0, len(model)), (0, 600)))))


def test_mutants_raise_ship_errors_or_work(require: Callable[[str, bool, str], None]) -> None:
    need_runtimes(require)
    found = shipped(write_network(RandomNetwork(4).network(8)), 150, 0)
    assert set(found) == {"ok", "ModelFileError", "UnsupportedModelError"}


@pytest.mark.full
@pytest.mark.parametrize("kinds", range(6))
def test_thousands_of_mutants(kinds: int, require: Callable[[str, bool, str], None]) -> None:
    need_runtimes(require)
    model = write_network(RandomNetwork(10 + kinds).network(4 + kinds))
    assert shipped(model, 1000, kinds).total() == 1000


@pytest.mark.full
@pytest.mark.parametrize("name", [*INT8, *FLOAT, "mcu/keyword_scrambled_8bit.tflite"])
def test_mutants_of_real_models(name: str, shared_data: Path) -> None:
    model = (shared_data / name).read_bytes()
    # Tables are before and after the weights.
    regions = ((0, 4000), (max(0, len(model) - 9000), 9000), (0, len(model)))
    with memory_limit(512):
        for mutant in mutants(model, 300, 0, regions):
            with suppress(ModelFileError, UnsupportedModelError):
                lower(parse_network(mutant))


def test_shared_names_do_not_exhaust_memory(
    require: Callable[[str, bool, str], None],
) -> None:
    need_runtimes(require)
    import flatbuffers

    to = flatbuffers.Builder(1 << 20)

    def table(*offsets: tuple[int, int]) -> int:
        to.StartObject(8)
        for field, offset in offsets:
            to.PrependUOffsetTRelativeSlot(field, offset, 0)
        return int(to.EndObject())

    def vector(offset: int, count: int) -> int:
        to.StartVector(4, count, 4)
        for _ in range(count):
            to.PrependUOffsetTRelative(offset)
        return int(to.EndVector())

    # 180 kB of file, 2 GB of names.
    shape = to.CreateNumpyVector(np.ones(1, np.int32))
    tensor = table((0, shape), (3, to.CreateString("n" * 100_000)))
    graph = table((0, vector(tensor, 20_000)))
    buffers = vector(table(), 1)
    to.Finish(table((2, vector(graph, 1)), (4, buffers)), b"TFL3")
    with memory_limit(256), pytest.raises(ModelFileError, match="repeatedly"):
        parse_network(bytes(to.Output()))


def test_refuses_invalid_scales(require: Callable[[str, bool, str], None]) -> None:
    need_runtimes(require)
    for scale, zero in ((0.0, 0), (1e-40, 0), (3e38, 0), (0.1, 200)):
        grid = Quantization(np.array([scale], np.float32), np.array([zero], np.int64))
        plain = Quantization(np.array([0.1], np.float32), np.array([0], np.int64))
        tensors = tuple(
            Tensor(name, (1, 4), "int8", quantization)
            for name, quantization in (("a", grid), ("b", plain), ("c", plain))
        )
        add = Operator("add", (0, 1), (2,), {"activation": "relu6"})
        network = Network("sums", tensors, (add,), (0, 1), (2,))
        assert ship(write_network(network)) == (
            "ok" if scale in (1e-40, 3e38) else "UnsupportedModelError"
        )


def test_refuses_constant_and_float_ports() -> None:
    grid = Quantization(np.array([0.1], np.float32), np.array([0], np.int64))
    pair = (Tensor("a", (1, 4), "int8", grid), Tensor("b", (1, 4), "int8", grid))
    add = Operator("add", (0, 0), (1,), {"activation": "none"})
    for other in (
        Tensor("c", (1, 4), "int8", grid, np.zeros((1, 4), np.int8)),
        Tensor("c", (1, 4), "int8", grid, variable=True),
        Tensor("c", (1, 4), "float32"),
    ):
        with pytest.raises(UnsupportedModelError, match=r"'c'.*\bint8\b"):
            lower(Network("odd", (*pair, other), (add,), (0,), (1, 2)))
    with pytest.raises(UnsupportedModelError, match=r"'c'.*\bint8\b"):
        lower(Network("odd", (*pair, Tensor("c", (1, 4), "float32")), (add,), (0, 2), (1,)))


def test_refuses_open_shapes(require: Callable[[str, bool, str], None]) -> None:
    need_runtimes(require)
    import flatbuffers
    from ai_edge_litert.schema_py_generated import ModelT

    def opened(dimension: int) -> bytes:
        model = ModelT.InitFromPackedBuf(write_network(RandomNetwork(4).network(1)), 0)
        graph = model.subgraphs[0]
        tensor = graph.tensors[graph.inputs[0]]
        signature = tensor.shape.copy()
        signature[dimension] = -1
        tensor.shapeSignature = signature
        to = flatbuffers.Builder(1 << 12)
        to.Finish(model.Pack(to), b"TFL3")
        return bytes(to.Output())

    # An open batch size runs with the stored one.
    assert parse_network(opened(0)).operators
    with pytest.raises(UnsupportedModelError, match=r"\bshape\b") as refused:
        parse_network(opened(1))
    assert "tensor 't0'" in str(refused.value.where)


def test_only_minus_one_omits_an_optional_input() -> None:
    network = RandomNetwork(4).network(1, ["connected"])
    (operator,) = network.operators

    def with_bias(index: int) -> bytes:
        changed = replace(operator, inputs=(*operator.inputs[:2], index))
        return write_network(replace(network, operators=(changed,)))

    assert parse_network(with_bias(-1)).operators[0].inputs[2] == -1
    for index in (-2, len(network.tensors)):
        with pytest.raises(ModelFileError, match=rf"tensor {index}\b"):
            parse_network(with_bias(index))


def test_option_types_and_names_of_metadata_are_written(
    require: Callable[[str, bool, str], None],
) -> None:
    need_runtimes(require)
    from ai_edge_litert.schema_py_generated import BuiltinOptions, ModelT

    data = write_network(RandomNetwork(4).network(6), {"plan": b"words"})
    model = ModelT.InitFromPackedBuf(data, 0)
    assert [entry.name for entry in model.metadata] == [b"plan"]
    types = {name: number for name, number in vars(BuiltinOptions).items() if name[0] != "_"}
    assert [operator.builtinOptionsType for operator in model.subgraphs[0].operators] == [
        types[f"{name}Options"]
        for name in ("Conv2D", "DepthwiseConv2D", "FullyConnected", "Pool2D", "Add", "Softmax")
    ]


def test_refuses_other_files(tmp_path: Path) -> None:
    file = tmp_path / "model.tflite"
    file.write_bytes(b"PK\x03\x04 surely a zip")
    with pytest.raises(ModelFileError, match=r"not a \.tflite model") as refused:
        read_network(file)
    assert refused.value.where == str(file)
    with pytest.raises(ModelFileError, match=r"\bno file\b.*\babsent\.tflite\b"):
        read_network(tmp_path / "absent.tflite")


@pytest.mark.parametrize(
    ("activation", "limits"),
    [("none", (-128, 127)), ("relu", (5, 127)), ("relu6", (5, 65)), ("relu_n1_to_1", (-5, 15))],
)
def test_activations_limit_codes_from_their_zero_point(
    activation: str, limits: tuple[int, int]
) -> None:
    grid = Quantization(np.array([0.1], np.float32), np.array([5], np.int64))
    tensors = tuple(Tensor(name, (1, 4), "int8", grid) for name in "abc")
    add = Operator("add", (0, 1), (2,), {"activation": activation})
    (step,) = lower(Network("sum", tensors, (add,), (0, 1), (2,))).steps
    assert (step.numbers["low"], step.numbers["high"]) == limits


def test_a_depthwise_convolution_holds_four_rows_and_one_row_of_sums(shared_data: Path) -> None:
    network = read_network(shared_data / "mcu/person_detect.tflite")
    rows = [step for step in lower(network).steps if step.kernel == "slip_depthwise_2d"]
    assert rows
    for step in rows:
        in_w, out_w = step.numbers["in_w"], step.numbers["out_w"]
        assert 8 * in_w + 4 * out_w <= step.scratch <= 8 * (in_w + 4) + 4 * (out_w + 1)
