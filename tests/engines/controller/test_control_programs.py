"""Programs are checked while they are traced; their size does not depend on shards."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import control_functions as functions
import pytest
import torch

from slipstream.engines.controller import (
    PARTIAL,
    REPLICATED,
    Controller,
    TracedProgram,
    compiled,
    predict_launch,
    sharded,
)
from slipstream.engines.controller.simulating import ControlCosts
from slipstream.errors import InvalidArgumentError, SlipstreamError, UsageError, WorkloadError


@pytest.fixture
def sim() -> Iterator[Controller]:
    with Controller(4, 2, "sim") as controller:
        yield controller


def chain(pool: Controller, devices: int, nodes: int = 8) -> TracedProgram:
    part = pool.slice(devices)
    with pool.program("chain") as program:
        x = program.input("x", torch.ones(4096, 2), part, sharded(0))
        for _ in range(nodes):
            x = functions.scaled(x)
        program.output("x", x)
    return program


def test_graph_and_messages_do_not_depend_on_shards_or_nodes() -> None:
    sizes = set()
    for devices, nodes in ((1, 8), (1024, 8), (1, 512)):
        with Controller(4, devices, "sim") as pool:
            program = chain(pool, 4 * devices, nodes)
            sizes.add(len(program.nodes) - nodes)
            for _ in range(3):
                pool.launch(program).wait(30)
            assert pool.messages["launch sent"] == pool.messages["done received"] == 3 * 4
    assert sizes == {0}


def test_transfers_are_inserted_once_where_layouts_differ(sim: Controller) -> None:
    both, single = sim.slice(2), sim.slice(1)
    with sim.program("p") as program:
        x = program.input("x", torch.ones(4, 3), both, sharded(0))
        total = functions.product(x, x)
        program.output("a", functions.plus_one(total, on=single))
        program.output("b", functions.plus_one(total, on=single))
    assert [node.name for node in program.nodes] == [
        "product", "sum", "move", "plus_one", "plus_one",
    ]  # fmt: skip
    assert (total.sharding, program.outputs["a"].shape) == (PARTIAL, (3, 3))


def test_peak_counts_values_until_their_last_use(sim: Controller) -> None:
    program = chain(sim, 2)
    shard = 4096 * 2 * 4 // 2
    assert list(program.peak_bytes().values()) == [2 * shard]


def test_mistakes_are_named_while_tracing(sim: Controller) -> None:
    part, other = sim.slice(3), sim.slice(2)
    with sim.program("first") as first:
        foreign = first.input("x", torch.ones(6), part)

    @compiled
    def local(x: torch.Tensor) -> torch.Tensor:
        return x

    with sim.program("p") as program:
        x = program.input("x", torch.ones(4), other, sharded(0))
        for wrong, error, words in (
            (lambda: sim.slice(9), InvalidArgumentError, "pool has 8"),
            (lambda: program.input("y", torch.ones(4), part, sharded(0)), InvalidArgumentError,
             "into 3 equal parts"),
            (lambda: functions.scaled(x, on=part), InvalidArgumentError, "into 3 equal parts"),
            (lambda: functions.plus_one(foreign), InvalidArgumentError, "not a value of program"),
            (lambda: functions.plus_one(x, torch.ones(2)), InvalidArgumentError, "program.input"),
            (lambda: functions.scaled(x, factor=object()), InvalidArgumentError, "object"),
            (lambda: functions.nonzero(x), WorkloadError, "depends on values"),
            (lambda: functions.product(x), WorkloadError, "product in program 'p' failed"),
            (lambda: local(x), InvalidArgumentError, "module level"),
            (lambda: program.output("x", foreign), InvalidArgumentError, "not a value of program"),
            (lambda: program.input("x", torch.ones(4), other), InvalidArgumentError, "twice"),
            (lambda: program.carry("x", functions.plus_one(x)), InvalidArgumentError,
             "unlike input"),
            (lambda: sim.program("inner").__enter__(), UsageError, "within another one"),
            (lambda: sim.launch(sim.program("empty")), UsageError, "is empty"),
            (lambda: predict_launch(first), UsageError, "is empty"),
            (lambda: sim.slice(1.5), InvalidArgumentError, "1.5 is not an integer"),  # type: ignore[arg-type]
            (lambda: program.input("s", torch.eye(4).to_sparse(), other), InvalidArgumentError,
             "sparse_coo tensor on cpu"),
        ):  # fmt: skip
            with pytest.raises(error) as raised:
                wrong()
            assert words in str(raised.value)
        program.output("y", functions.scaled(x))
    wrong_inputs = ({"z": torch.ones(4)}, {"x": torch.ones(5)}, {"x": torch.ones(4).double()})
    for inputs in (*wrong_inputs, {"x": 1.0}, {"x": torch.ones(4, device="meta")}):
        with pytest.raises(SlipstreamError):
            sim.launch(program, inputs)  # type: ignore[arg-type]
    match = "is of another controller"
    with Controller(8, engine="sim") as another, pytest.raises(InvalidArgumentError, match=match):
        another.launch(program)


@pytest.mark.parametrize(
    "wrong", [{"hosts": "2"}, {"devices": 0}, {"depth": 1.5}, {"device_bytes": 0}, {"stall_s": 0.0}]
)
def test_arguments_of_a_controller_are_checked(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError, match=next(iter(wrong))):
        Controller(**{"engine": "sim", **wrong})


def test_outside_of_a_program_functions_run_here() -> None:
    assert functions.plus_one(torch.zeros(1)).item() == 1
    assert functions.with_sum(torch.ones(2, 2))[1].item() == 4


def test_predicted_launch_is_the_sum_of_its_parts(sim: Controller) -> None:
    program = chain(sim, 4, nodes=3)
    sim.bind(program)
    costs = ControlCosts(message_ns=10, latency_ns=100, prepare_ns=1, bytes_per_ns=1)
    found = predict_launch(program, 1000.0, costs)
    # The second host's message, then its latency, a preparation, and three computations.
    assert found.launch_ns == 20 + 100 + 1 + 3 * 1000
    assert (found.period_ns, found.device_ns, found.hides_ns) == (3000, 3000, 20)


def test_prediction_needs_bound_slices(sim: Controller) -> None:
    with pytest.raises(UsageError, match="unbound"):
        predict_launch(chain(sim, 2))


def test_replicated_is_the_default_layout(sim: Controller) -> None:
    with sim.program("p") as program:
        x = program.input("x", torch.ones(4), sim.slice(2))
        assert functions.plus_one(x).sharding == REPLICATED
