"""FusedLAMB against the update in float64, and as a technique."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from encoders import plain
from recorded import build, graph_of

from known_durations import context_for, timed_by_bytes
from slipstream.errors import InvalidArgumentError, WorkloadError
from slipstream.techniques.pretraining import FusedLAMB, lamb
from slipstream.techniques.pretraining.technique import FusedLamb
from slipstream_bench.encoders import LAMB

SHAPES = ((70, 33), (77,), (5,))


def parameters(dtype: torch.dtype) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]
    weights[2].zero_()
    first, *others = (torch.nn.Parameter(weight) for weight in weights)
    return [{"params": [first, others[1]]}, {"params": others[:1], "weight_decay": 0.0}]


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("threads", [1, 2])
def test_two_hundred_updates_equal_those_in_float64(
    compiled: bool, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not compiled:
        monkeypatch.setattr(lamb, "why_no_compiler", lambda: "none is installed")
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    ours, exact = (
        kind(parameters(dtype), lr=1e-2)
        for kind, dtype in ((FusedLAMB, torch.float32), (LAMB, torch.float64))
    )
    generator = torch.Generator().manual_seed(1)
    pairs = [
        (p, q)
        for a, b in zip(ours.param_groups, exact.param_groups, strict=True)
        for p, q in zip(a["params"], b["params"], strict=True)
    ]
    for _ in range(200):
        for p, q in pairs:
            p.grad = torch.randn(p.shape, generator=generator)
            q.grad = p.grad.double()
        ours.step(), exact.step()
    for p, q in pairs:
        assert float((p - q).detach().abs().max() / q.detach().abs().max()) < 1e-5


def test_gradients_are_clipped_by_their_common_norm() -> None:
    first, second = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    optimizer = FusedLAMB([first, second], max_grad_norm=1.0)
    first.grad, second.grad = torch.full((3,), 30.0), torch.full((3,), 40.0)
    optimizer.step()
    norm = 50.0 * 3**0.5
    moments = optimizer.state[second]["exp_avg"]
    torch.testing.assert_close(moments, torch.full((3,), 0.1 * 40.0 / norm))


def test_state_survives_saving_and_replacing_a_users_lamb() -> None:
    theirs = LAMB(parameters(torch.float32), lr=1e-2)
    for group in theirs.param_groups:
        for p in group["params"]:
            p.grad = torch.ones_like(p)
    theirs.step()
    ours = FusedLAMB.like(theirs)
    assert ours.param_groups[1]["weight_decay"] == 0.0
    restored = FusedLAMB(copy.deepcopy(theirs.param_groups))
    restored.load_state_dict(copy.deepcopy(ours.state_dict()))
    first, copied = (o.param_groups[0]["params"][0] for o in (ours, restored))
    copied.grad = torch.ones_like(copied)
    ours.step(), restored.step()
    torch.testing.assert_close(first, copied)


def with_lamb() -> Any:
    model, batch, loss, _ = plain()
    return model, batch, loss, LAMB(model.parameters(), lr=1e-2)


def test_technique_replaces_the_users_lamb() -> None:
    technique = FusedLamb()
    graph = timed_by_bytes(graph_of(with_lamb))
    assert technique.why_not(graph) is None
    after = technique.predict(graph, context_for(technique, graph))
    assert len(after) < len(graph) - 100
    eager, fused = build(with_lamb), build(with_lamb, technique)
    for _ in range(3):
        assert float(fused.step()) == pytest.approx(float(eager.step()), rel=1e-5)
    assert isinstance(fused.optimizer, FusedLAMB)
    with pytest.raises(WorkloadError, match="has no optimizer LAMB"):
        build(plain, technique)


class Uncorrected(LAMB):
    """The correction of bias is that of the thousandth update."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                zeros = {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
                self.state[p] = {**zeros, **self.state[p], "step": 1000}
        super().step()


class Limited(LAMB):
    """Gradients are limited in their norm."""

    def step(self, closure: Any = None) -> Any:
        torch.nn.utils.clip_grad_norm_(self.param_groups[0]["params"], 1.0)
        super().step()


@pytest.mark.parametrize("kind", [Uncorrected, Limited])
def test_another_update_is_refused(kind: Any) -> None:
    def workload() -> Any:
        model, batch, loss, _ = plain()
        return model, batch, loss, type("Lamb", (kind,), {})(model.parameters())

    with pytest.raises(WorkloadError, match="Lamb does not compute LAMB's update"):
        build(workload, FusedLamb())


def test_sparse_gradients_are_clipped() -> None:
    sparse, dense = (torch.nn.Parameter(torch.ones(4, 2)) for _ in range(2))
    dense.grad = torch.zeros(4, 2).index_fill_(0, torch.tensor([1]), 5.0)
    sparse.grad = dense.grad.to_sparse(1)
    for parameter in (sparse, dense):
        FusedLAMB([parameter], max_grad_norm=1.0).step()
    torch.testing.assert_close(sparse, dense)


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"lr": -1.0}, "lr"),
        ({"lr": None}, "lr"),
        ({"betas": (0.9, 1.0)}, "betas"),
        ({"betas": 0.9}, "betas"),
        ({"max_grad_norm": 0.0}, "max_grad"),
    ],
)
def test_settings_out_of_range_are_refused(settings: Any, name: str) -> None:
    with pytest.raises(InvalidArgumentError, match=name):
        FusedLAMB([torch.nn.Parameter(torch.ones(2))], **settings)
