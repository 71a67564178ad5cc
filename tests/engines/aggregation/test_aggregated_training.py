"""Training through an aggregator: the numbers of gloo, and the ring when something ends."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from forked_ranks import run_ranks
from slipstream.child import Child
from slipstream.engines.aggregation import (
    AggregatedGradients,
    AggregationError,
    AggregationServer,
    AggregatorLostError,
    attach,
    compare_all_reduce,
    measuring,
)
from slipstream.errors import (
    CommunicationError,
    InvalidArgumentError,
    SlipstreamError,
    SlipstreamWarning,
    UsageError,
)
from slipstream.native import library
from slipstream.ranks import Netlab, why_no_netlab
from slipstream.ranks.group import ProcessGroup
from slipstream.ranks.launch import joined

PATIENT_S = 30.0


@pytest.fixture(autouse=True)
def native_library(require: Callable[[str, bool, str], None]) -> None:
    require("native", library() is not None, "the native library is not built")


@pytest.fixture
def server() -> Iterator[AggregationServer]:
    with AggregationServer() as server:
        yield server


def train(
    rank: int,
    steps: int,
    hook: Callable[[DistributedDataParallel], AggregatedGradients | None],
    at_step: Callable[[int], object] = lambda step: None,
    dtype: torch.dtype = torch.float32,
) -> dict[str, Any]:
    """Train a small model; return losses, a digest of the parameters, and the hook's state."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 40), nn.ReLU(), nn.Linear(40, 40), nn.Linear(40, 4)).to(dtype)
    model = DistributedDataParallel(net, bucket_cap_mb=0.004)
    attached = hook(model)
    optimizer = torch.optim.SGD(net.parameters(), 0.05)
    generator = torch.Generator().manual_seed(rank)
    losses = []
    for step in range(steps):
        at_step(step)
        batch = torch.randn(8, 16, generator=generator, dtype=torch.float32).to(dtype)
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    if attached is not None:
        attached.close()
    return {
        "losses": losses, "weights": [float(p.detach().double().sum()) for p in net.parameters()],
        "ring": attached and attached.ring, "buckets": attached and attached.buckets,
    }  # fmt: skip


def through(address: str, token: str | None, **settings: Any) -> Callable[[Any], Any]:
    settings = {"silent_s": PATIENT_S, **settings}
    return lambda model: attach(model, address, token=token, **settings)


def equal_weights(results: list[dict[str, Any]]) -> bool:
    return all(result["weights"] == results[0]["weights"] for result in results)


def test_training_has_the_losses_of_gloo(server: AggregationServer) -> None:
    hook = through(server.address, server.token)
    ours = run_ranks(3, lambda rank: train(rank, 12, hook))
    gloo = run_ranks(3, lambda rank: train(rank, 12, lambda model: None))
    assert equal_weights(ours)
    assert all(result["ring"] is None and result["buckets"] > 12 for result in ours)
    for result, reference in zip(ours, gloo, strict=True):
        assert result["losses"] == pytest.approx(reference["losses"], rel=1e-6)


def test_bfloat16_gradients_are_summed_in_float32(server: AggregationServer) -> None:
    hook = through(server.address, server.token)
    ours = run_ranks(2, lambda rank: train(rank, 3, hook, dtype=torch.bfloat16))
    assert equal_weights(ours)
    assert ours[0]["buckets"] > 0


def test_the_example_trains() -> None:
    example = Path(__file__).parents[3] / "examples" / "summed_gradients.py"
    # In a separate process, since its threads would not survive the forks of other tests.
    shown = subprocess.run(
        [sys.executable, str(example), "--steps", "21"], capture_output=True, text=True, check=True
    ).stdout
    losses = [float(text) for text in re.findall(r"loss ([\d.]+)", shown)]
    assert losses[-1] < losses[0]
    assert "21 buckets summed by the aggregator" in shown


def test_a_killed_aggregator_is_replaced_by_the_ring() -> None:
    with Child("the aggregator") as child:
        address, token = child.call(
            "slipstream.engines.aggregation.measuring:serve", listen="127.0.0.1:0", settings={},
            timeout_s=60.0,
        )  # fmt: skip
        pid = child.pid

        def kill(step: int) -> None:
            if step == 6:
                os.kill(pid, signal.SIGKILL)

        def work(rank: int) -> dict[str, Any]:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                result = train(rank, 12, through(address, token), kill if rank == 0 else id)
            return {**result, "warned": [str(w.message) for w in caught
                                         if isinstance(w.message, SlipstreamWarning)]}  # fmt: skip

        results = run_ranks(3, work)
    gloo = run_ranks(3, lambda rank: train(rank, 12, lambda model: None))
    assert equal_weights(results)
    for result, reference in zip(results, gloo, strict=True):
        assert result["buckets"] > 0
        assert "ended" in result["ring"]
        assert len(result["warned"]) == 1
        assert "use the ring" in result["warned"][0]
        assert result["losses"] == pytest.approx(reference["losses"], rel=1e-6)


class _LostAfter:
    """A member whose job ends after some sums; `sum` otherwise leaves the sum of two ranks."""

    def __init__(self, sums: int) -> None:
        self.left = sums

    def sum(self, vector: torch.Tensor, out: torch.Tensor) -> None:
        if not self.left:
            raise AggregatorLostError("the aggregator ended")
        self.left -= 1
        out.copy_(torch.full_like(vector, 3.0 + self.left))

    def close(self, *, clean: bool = True) -> None:
        pass


def test_a_sum_that_one_rank_lacks_is_sent_to_it() -> None:
    def work(rank: int) -> list[list[float]]:
        ranks = ProcessGroup(None, PATIENT_S, 5.0, "aggregation")
        # Rank 1 misses the result of the second bucket, which the others have.
        hook = AggregatedGradients(ranks, lambda job, lost: _LostAfter(1 if rank == 1 else 2))  # type: ignore[arg-type, return-value]
        if rank == 1:
            assert isinstance(hook._member, _LostAfter)
            hook._member.left = 1
        buckets = [torch.full((5,), float(rank)) for _ in range(3)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for bucket in buckets:
                hook.submit(bucket, last=False)
            hook._thread.wait()
        return [bucket.tolist() for bucket in buckets]

    results = run_ranks(3, work)
    assert results[0][1:] == results[1][1:] == results[2][1:] == [[1.0] * 5, [1.0] * 5]


def test_a_rank_that_dies_is_named_by_the_others(server: AggregationServer) -> None:
    def work(rank: int) -> Any:
        def die(step: int) -> None:
            if step == 3:
                os._exit(1)

        hook = through(server.address, server.token, timeout_s=5.0, patience_s=1.0)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return train(rank, 6, hook, die if rank == 1 else id)
        except CommunicationError as error:
            return list(error.ranks)

    results = run_ranks(3, work)
    assert results == [[1], None, [1]]


def test_attach_fails_on_all_ranks_or_none(
    server: AggregationServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SLIPSTREAM_AGGREGATION_TOKEN", raising=False)

    def work(rank: int) -> list[str]:
        model = DistributedDataParallel(nn.Linear(4, 4))
        found = []
        with pytest.raises(UsageError, match="token is missing"):
            attach(model, server.address)
        with pytest.raises(InvalidArgumentError, match="Linear, not a Distributed"):
            attach(nn.Linear(4, 4), server.address)  # type: ignore[arg-type]
        for address, token in (
            (server.address if rank else "127.0.0.1:1", server.token),
            (server.address, server.token if rank else "wrong"),
        ):
            with pytest.raises(AggregationError) as caught:
                attach(model, address, token=token, join_s=1.0)
            found.append(caught.value.what)
        with pytest.warns(SlipstreamWarning, match="use the ring: .* slots"):
            hook = attach(model, server.address, token=server.token, window=4000)
        model(torch.ones(2, 4)).sum().backward()
        assert hook.ring is not None
        return found

    first, second = run_ranks(2, work)
    assert first == second
    assert "rank 0 of job" in first[0]
    assert "the token is wrong" in first[1]


def test_in_a_lab_a_rank_sends_each_byte_once(require: Callable[[str, bool, str], None]) -> None:
    require("netlab", why_no_netlab() is None, why_no_netlab() or "")
    found = compare_all_reduce(2, 1 << 20, lab_bytes_per_s=5e7, blocks=2)
    assert 1.0 < found.sent_bytes["aggregator"] / found.nbytes <= 1.04
    assert "Mbit/s" in str(found.table().title)


def test_packets_larger_than_the_path_are_named(require: Callable[[str, bool, str], None]) -> None:
    require("netlab", why_no_netlab() is None, why_no_netlab() or "")
    with Netlab(2, 5e7) as lab:
        address, switch = lab.switch_host(mtu=1500)
        with measuring.serving(switch, f"{address}:0") as (at, token), joined(lab.ranks()) as call:
            job = {"nbytes": 1 << 20, "address": at, "token": token, "window": 8, "mtu": 9000}
            call(f"{measuring.__name__}:prepare", job)
            with pytest.raises(SlipstreamError, match=r"packets of \d+ bytes .* MTU .* rank \d of"):
                call(f"{measuring.__name__}:turn", {"arm": "aggregator"})
