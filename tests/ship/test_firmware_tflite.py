"""Reading .tflite files: what is in them, and what damaged ones are told."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from models import FLOAT, INT8, MICRO_SPEECH, PERSON_DETECT, need_runtimes

from slipstream.ship import ModelFileError, UnsupportedModelError
from slipstream.ship.firmware import lower, parse_network, read_network
from slipstream.ship.firmware.tflite import CODES


def test_operator_codes_are_the_schema_s(require: Callable[[str, bool, str], None]) -> None:
    need_runtimes(require)
    from ai_edge_litert.schema_py_generated import BuiltinOperator

    known = {name.lower(): code for name, code in vars(BuiltinOperator).items() if name[0] != "_"}
    assert {name: known.get(name) for name in CODES} == CODES


@pytest.mark.parametrize("name", INT8)
def test_tensors_are_those_that_litert_reads(
    name: str, shared_data: Path, require: Callable[[str, bool, str], None]
) -> None:
    need_runtimes(require)
    from ai_edge_litert.schema_py_generated import ModelT

    data = (shared_data / name).read_bytes()
    graph = ModelT.InitFromPackedBuf(data, 0).subgraphs[0]
    network = parse_network(data)
    assert [list(one.shape) for one in network.tensors] == [t.shape.tolist() for t in graph.tensors]
    assert [one.name.encode() for one in network.tensors] == [t.name for t in graph.tensors]
    assert [list(one.inputs) for one in network.operators] == [
        o.inputs.tolist() for o in graph.operators
    ]
    for ours, theirs in zip(network.tensors, graph.tensors, strict=True):
        scales = theirs.quantization.scale if theirs.quantization else None
        found = ours.quantization
        assert np.array_equal(
            [] if found is None else found.scales, [] if scales is None else scales
        )


@pytest.mark.parametrize("name", FLOAT)
def test_float_models_are_refused_with_all_their_operators(name: str, shared_data: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="float32") as refused:
        lower(read_network(shared_data / name))
    assert "fully_connected" in refused.value.operators


def test_all_unsupported_operators_are_named_at_once(shared_data: Path) -> None:
    with pytest.raises(UnsupportedModelError) as refused:
        lower(read_network(shared_data / "mcu/keyword_scrambled_8bit.tflite"))
    assert refused.value.operators == ("quantize", "softmax", "svdf")


def test_truncated_files_are_damaged(shared_data: Path) -> None:
    data = (shared_data / MICRO_SPEECH).read_bytes()
    for end in (*range(8, 2000, 7), *range(2000, len(data) - 16, 997)):
        with pytest.raises((ModelFileError, UnsupportedModelError)):
            lower(parse_network(data[:end]))


def test_flipped_bits_give_named_errors_or_a_model(shared_data: Path) -> None:
    data = (shared_data / PERSON_DETECT).read_bytes()
    dice = np.random.default_rng(0)
    refused = 0
    # Where tables and offsets are; weights are any bytes.
    places = np.r_[dice.integers(0, 4000, 100), dice.integers(0, len(data), 50)]
    for place in places:
        flipped = bytearray(data)
        flipped[place] ^= 1 << dice.integers(8)
        try:
            lower(parse_network(bytes(flipped)))
        except (ModelFileError, UnsupportedModelError):
            refused += 1
    assert 10 < refused < 150


def test_what_is_no_model_is_told_so(tmp_path: Path) -> None:
    file = tmp_path / "model.tflite"
    file.write_bytes(b"PK\x03\x04 surely a zip")
    with pytest.raises(ModelFileError, match="this is not") as refused:
        read_network(file)
    assert refused.value.where == str(file)
    with pytest.raises(ModelFileError, match="there is no file"):
        read_network(tmp_path / "absent.tflite")
