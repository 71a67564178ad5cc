"""Adasum across nodes of means within them: against the rule, with equal bits on all ranks."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
import torch
from torch import nn

from forked_ranks import run_ranks
from slipstream.errors import CommunicationError, InvalidArgumentError
from slipstream.ranks.wire import Wire
from slipstream.technique import parse
from slipstream.techniques.distributed import AdasumOptimizer, adasum_all_reduce
from slipstream.techniques.distributed.adasum.exchange import check, check_algorithm, exchange
from slipstream.techniques.distributed.adasum.technique import Adasum
from slipstream_bench.systems.adasum.reference import adasum_of
from small_steps import SLOW, context, graph_of

torch.optim.SGD([torch.zeros(1)], 0.1)
LENGTH = 1003
LAYERS = (0, 1, 1, 300, 900)


def ours(rank: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    drawn = torch.Generator().manual_seed(rank)
    return (torch.linspace(-1, 1, LENGTH) + torch.randn(LENGTH, generator=drawn)).to(dtype)


def expected(size: int, per_node: int) -> torch.Tensor:
    rows = torch.stack([ours(rank).double() for rank in range(size)])
    means = rows.view(size // per_node, per_node, -1).mean(1)
    ends = [*LAYERS, LENGTH]
    return torch.cat([adasum_of(list(means[:, a:b])) for a, b in itertools.pairwise(ends)])


@pytest.mark.parametrize(("size", "per_node"), [(4, 2), (6, 3), (6, 2), (3, 3)])
def test_gradients_are_averaged_within_nodes_and_combined_across(size: int, per_node: int) -> None:
    def work(rank: int) -> Any:
        found = []
        for dtype in (torch.float32, torch.bfloat16):
            tensor = ours(rank, dtype)
            adasum_all_reduce(tensor, LAYERS, per_node=per_node)
            found.append(tensor)
        return found

    found = run_ranks(size, work)
    reference = expected(size, per_node)
    for number, bound in enumerate((1e-6, 2e-2)):
        assert all(torch.equal(result[number], found[0][number]) for result in found)
        off = (found[0][number].double() - reference).norm() / reference.norm()
        assert float(off) <= bound


def test_less_data_goes_to_other_nodes() -> None:
    size, per_node, length = 4, 2, 4096

    def work(rank: int) -> int:
        flat = torch.randn(length)
        wire = Wire.of()
        exchange(flat, check(flat, (0, 100), "auto", size), wire, per_node=per_node)
        return wire.payload_bytes

    # Two slices within the node and back, and half of a slice to the other node and back.
    for payload in run_ranks(size, work):
        assert payload == 4 * (2 * length // 2 + 2 * length // 4)


def test_an_optimizer_combines_nodes_and_a_nonfinite_gradient_makes_all_skip() -> None:
    def work(rank: int) -> Any:
        torch.manual_seed(0)
        model = nn.Linear(8, 4)
        optimizer = AdasumOptimizer(
            torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), per_node=2
        )
        for step in range(3):
            optimizer.zero_grad()
            x = torch.randn(6, 8, generator=torch.Generator().manual_seed(10 * step + rank))
            (model(x) * (torch.inf if rank == 3 and step == 1 else 1.0)).square().mean().backward()
            optimizer.step()
        return torch.cat([p.detach().flatten() for p in model.parameters()]), optimizer.skipped

    found = run_ranks(4, work)
    assert all(torch.equal(weights, found[0][0]) and skipped == 1 for weights, skipped in found)
    assert found[0][0].isfinite().all()


def test_invalid_nodes_are_named() -> None:
    for per_node, size, algorithm in ((0, 4, "auto"), (3, 4, "auto"), (2, 4, "rvh")):
        with pytest.raises(InvalidArgumentError, match=r"per_node|algorithm"):
            check_algorithm(algorithm, size, per_node)
    with pytest.raises(InvalidArgumentError, match="adasum:per_node"):
        Adasum(4, per_node=3)

    def work(rank: int) -> Any:
        adasum_all_reduce(torch.ones(4), per_node=1 + rank)

    for error in run_ranks(2, work):
        assert isinstance(error, CommunicationError)
        assert "settings of the call" in error.what


def test_a_prediction_communicates_by_nodes() -> None:
    graph = graph_of("mlp")
    (settings,) = parse("adasum:4,per_node=2")
    found = settings.predict(graph, context(SLOW))
    found.check()
    (row,) = found.exchanges
    assert row.collective.group is not None
    assert row.collective.group.shape == (2, 2)
    assert "per_node=2" in settings.code(None).note  # type: ignore[arg-type,union-attr]
    assert re.search(r"\bone node\b", settings.quality(graph).basis)
