"""`Call`, the key of a duration."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.graph import ITEM_BYTES, SCALAR_TYPE, Call, TensorSpec, cast

sizes = st.lists(st.integers(0, 9), max_size=4).map(tuple)
specs = st.builds(
    TensorSpec, st.sampled_from(sorted(ITEM_BYTES)), sizes, sizes, st.sampled_from(["cpu", "cuda"])
)
scalars = (
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.floats() | st.text(max_size=5)
)
arguments = st.recursive(
    specs | scalars, lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=8
)
calls = st.builds(
    Call,
    st.sampled_from(["aten::mm(Tensor self, Tensor mat2) -> Tensor", "aten::add.Tensor(...)"]),
    st.lists(arguments, max_size=4).map(tuple),
    st.lists(specs, max_size=3).map(tuple),
)


@given(calls)
def test_json_round_trip_preserves_every_argument(call: Call) -> None:
    back = Call.from_json(json.loads(json.dumps(call.to_json())))
    # repr, because nan is not equal to itself
    assert repr(back) == repr(call)
    assert back.key == call.key


@given(calls, calls)
def test_equal_keys_are_equal_operator_and_arguments(first: Call, other: Call) -> None:
    equal = (first.op, repr(first.arguments)) == (other.op, repr(other.arguments))
    assert (first.key == other.key) == equal


@given(calls)
def test_outputs_do_not_identify_a_call(call: Call) -> None:
    assert Call(call.op, call.arguments).key == call.key


@given(calls)
def test_a_call_with_its_own_dtypes_is_unchanged(call: Call) -> None:
    same = call.with_dtypes(
        [spec.dtype for spec in call.inputs], [spec.dtype for spec in call.outputs]
    )
    assert repr(same) == repr(call)


@given(calls)
def test_new_dtypes_are_in_the_order_of_inputs(call: Call) -> None:
    expected = ["bfloat16" if i % 2 else "int8" for i in range(len(call.inputs))]
    changed = call.with_dtypes(expected)
    assert [spec.dtype for spec in changed.inputs] == expected
    assert [spec.shape for spec in changed.inputs] == [spec.shape for spec in call.inputs]


def test_inputs_are_found_inside_lists() -> None:
    a, b = TensorSpec("float32", (2,), (1,)), TensorSpec("int64", (3,), (1,))
    assert Call("aten::cat(...)", ((a, (b, None)), 1, a)).inputs == (a, b, a)


@pytest.mark.parametrize(
    ("op", "name"),
    [
        ("aten::mm(Tensor self, Tensor mat2) -> Tensor", "aten::mm"),
        ("aten::add.Tensor(Tensor self, Tensor other) -> Tensor", "aten::add"),
        ("aten::relu_(Tensor(a!) self) -> Tensor(a!)", "aten::relu_"),
    ],
)
def test_the_name_has_neither_overload_nor_arguments(op: str, name: str) -> None:
    assert Call(op, ()).name == name


@given(specs)
def test_bytes_are_elements_times_item(spec: TensorSpec) -> None:
    assert spec.nbytes == math.prod(spec.shape) * ITEM_BYTES[spec.dtype]


def test_item_sizes_and_type_codes_are_torchs() -> None:
    import torch

    graph = "graph(%x : Tensor):\n  %code : int = prim::dtype(%x)\n  return (%code)"
    code_of = torch._C._create_function_from_graph("code_of", torch._C.parse_ir(graph))
    for name, size in ITEM_BYTES.items():
        tensor = torch.empty(1, dtype=getattr(torch, name))
        assert tensor.element_size() == size
        assert SCALAR_TYPE[name] == code_of(tensor)


def test_a_cast_is_the_call_that_torch_makes() -> None:
    import torch

    spec = TensorSpec("float32", (3, 4), (1, 3))
    made = cast(spec, "bfloat16")
    schema = torch._C.parse_schema(made.op)
    assert schema == torch.ops.aten._to_copy.default._schema
    assert len(made.arguments) == len(schema.arguments)
    assert made.outputs[0].dtype == "bfloat16"
