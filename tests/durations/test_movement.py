"""Regions of operators, their savings, and invariants of the accounting."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from slipstream.durations.movement import (
    OperatorClass,
    analyze,
    find_regions,
    movement,
)
from slipstream.durations.work import work
from slipstream.graph import Call, StepPhase, TensorSpec
from slipstream.graph.operations import Operation
from slipstream.graph.traffic import operator_class, stored_elements, traffic
from slipstream_bench.systems.movement.recomputation import with_recomputation
from tiny_models import captured

_NEG = "aten::neg(Tensor self) -> Tensor"
_ADD = "aten::add.Tensor(Tensor self, Tensor other, *, Scalar alpha=1) -> Tensor"
_MM = "aten::mm(Tensor self, Tensor mat2) -> Tensor"
_ADDMM = (
    "aten::addmm(Tensor self, Tensor mat1, Tensor mat2, *, Scalar beta=1, Scalar alpha=1) -> Tensor"
)
_CONVOLUTION = (
    "aten::mkldnn_convolution(Tensor self, Tensor weight, Tensor? bias, SymInt[] padding, "
    "SymInt[] stride, SymInt[] dilation, SymInt groups) -> Tensor"
)


def spec(*shape: int) -> TensorSpec:
    strides = [1] * len(shape)
    for i in reversed(range(len(shape) - 1)):
        strides[i] = strides[i + 1] * shape[i + 1]
    return TensorSpec("float32", shape, tuple(strides))


def operation(number: int, op: str, reads: list[int], part: int = 0, size: int = 4) -> Operation:
    """Return an operator on squares, whose output has the number of its value."""
    x = spec(size, size)
    call = Call(op, tuple(x for _ in reads), (x,))
    return Operation(number, call, tuple((v, x.nbytes) for v in reads), ((number, x.nbytes),), part)


@st.composite
def programs(draw: st.DrawFn) -> list[Operation]:
    """Return operators that read earlier values; negative ones come from outside."""
    found = []
    for number in range(draw(st.integers(1, 30))):
        op = draw(st.sampled_from([_NEG, _ADD, _MM]))
        count = 1 if op == _NEG else 2
        reads = [draw(st.integers(max(-3, number - 9), number - 1)) for _ in range(count)]
        part, size = draw(st.integers(0, 1)), draw(st.sampled_from([4, 4, 8]))
        found.append(operation(number, op, reads, part, size))
    return found


@given(programs())
def test_no_region_waits_for_itself(program: list[Operation]) -> None:
    region = find_regions(program)
    after: dict[int, set[int]] = {}
    for operation in program:
        for v, _ in operation.reads:
            if v >= 0 and region[v] != region[operation.task]:
                after.setdefault(region[v], set()).add(region[operation.task])
    seen: dict[int, int] = {}

    def visit(node: int) -> None:
        seen[node] = 1
        for following in after.get(node, ()):
            assert seen.get(following) != 1, "a cycle of regions"
            if following not in seen:
                visit(following)
        seen[node] = 2

    for node in set(region):
        if node not in seen:
            visit(node)


@given(programs())
def test_a_region_has_one_phase_and_size_and_no_contraction(program: list[Operation]) -> None:
    region = find_regions(program)
    for number in set(region):
        inside = [operation for operation, r in zip(program, region, strict=True) if r == number]
        assert len({(operation.part, operation.call.outputs[0].shape) for operation in inside}) == 1
        kinds = {operator_class(operation.call) for operation in inside}
        assert len(inside) == 1 or OperatorClass.CONTRACTION not in kinds


@given(programs())
def test_fusing_never_needs_more_than_was_moved(program: list[Operation]) -> None:
    lasting = {len(program) - 1}
    rows = analyze(program, lasting)
    assert all(0 <= row.needed_bytes <= row.moved_bytes for row in rows)
    assert [row.moved_bytes for row in rows] == [operation.moved for operation in program]


@given(programs())
def test_recomputation_never_needs_more(program: list[Operation]) -> None:
    regions, lasting = find_regions(program), {len(program) - 1}
    again = with_recomputation(program, lasting)
    before, after = (
        sum(row.needed_bytes for row in analyze(p, lasting, regions)) for p in (program, again)
    )
    assert after <= before


def test_a_chain_needs_only_its_ends() -> None:
    chain = [operation(i, _NEG, [i - 1]) for i in range(5)]
    rows = analyze(chain, {4})
    assert sum(row.needed_bytes for row in rows) == 2 * 64
    assert sum(row.moved_bytes for row in rows) == 10 * 64


def test_a_contraction_splits_a_chain() -> None:
    program = [operation(0, _NEG, [-1]), operation(1, _MM, [0, -2]), operation(2, _NEG, [1])]
    assert len(set(find_regions(program))) == 3


def test_an_early_operator_joins_its_first_user() -> None:
    # A mask without inputs is drawn long before the tensor that it is multiplied with exists.
    program = [
        operation(0, _NEG, [-3]), operation(1, _MM, [-1, -2]), operation(2, _ADD, [1, 0]),
    ]  # fmt: skip
    regions = find_regions(program)
    assert regions[0] == regions[2] != regions[1]


def test_expanded_dimensions_occupy_memory_once() -> None:
    assert stored_elements(TensorSpec("float32", (5, 7), (0, 1))) == 7
    assert stored_elements(TensorSpec("float32", (5, 0), (0, 1))) == 0
    assert stored_elements(TensorSpec("float32", (6, 3), (1, 1))) == 8


def test_views_move_nothing() -> None:
    call = Call("aten::view(Tensor(a) self, SymInt[] size) -> Tensor(a)", (spec(4, 4), (16,)),
                (spec(16),))  # fmt: skip
    assert traffic(call).total == 0
    assert operator_class(call) is OperatorClass.VIEW


def test_arithmetic_of_operators_with_keyword_arguments_is_counted() -> None:
    call = Call(_ADDMM, (spec(5), spec(3, 4), spec(4, 5), 1, 1), (spec(3, 5),))
    found = work(call)
    assert found is not None
    assert found.flops == 2 * 3 * 4 * 5


def test_a_convolution_of_the_library_computes_as_much_as_any_other() -> None:
    call = Call(_CONVOLUTION, (spec(2, 6, 8, 8), spec(10, 3, 3, 3), None), (spec(2, 10, 6, 6),))
    found = work(call)
    assert found is not None
    # Two groups: a filter reads three of the six channels.
    assert found.flops == 2 * (2 * 10 * 6 * 6) * (3 * 3 * 3)


def test_written_arguments_are_found_after_bracketed_ones() -> None:
    # Lists with commas, and aliases, before the written argument.
    op = "x::y(Tensor(a!) self, int[2] stride=[1, 1], *, Tensor other, Tensor(b!) out) -> ()"
    found = traffic(Call(op, (spec(2), (1, 1), spec(3), spec(5)), ()))
    assert found.extra == 4 * (2 + 5)


def test_a_recorded_step_is_accounted_for_in_order() -> None:
    graph = captured("transformer")
    rows = movement(graph)
    assert all(a.task < b.task for a, b in pairwise(rows))
    phases = {graph.task(row.task).phase for row in rows if row.moved_bytes}
    assert {StepPhase.FORWARD, StepPhase.BACKWARD} <= phases
    lines = {graph.task(row.task).module for row in rows if row.kind is OperatorClass.CONTRACTION}
    assert any("blocks" in line for line in lines)
