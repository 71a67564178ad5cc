"""Updates interleaved with matmuls of gradients: the same training, a faster step, or a reason."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from known_durations import KnownDurations
from slipstream.codegen import why_no_compiler
from slipstream.durations import Timing
from slipstream.errors import SlipstreamError, WorkloadError
from slipstream.graph import Call, Graph
from slipstream.provenance import Provenance
from slipstream.technique import Context, combine, parse
from slipstream.techniques.side_by_side.nn import InterleavedLinear, UpdateQueue, interleave_updates
from slipstream.techniques.side_by_side.technique import SideBySide
from slipstream.techniques.side_by_side.timing import pair_call, timer
from slipstream.verbs.profiling import profile
from slipstream.workload import Workload, build_from

pytestmark = pytest.mark.skipif(why_no_compiler() is not None, reason=str(why_no_compiler()))
Made = tuple[nn.Sequential, tuple[torch.Tensor, torch.Tensor], Any, torch.optim.Optimizer]

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "descent": functools.partial(torch.optim.SGD, lr=0.1),
    "momentum": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1),
    "adam": functools.partial(torch.optim.Adam, lr=0.01, eps=1e-3, weight_decay=0.1),
    "adamw": functools.partial(torch.optim.AdamW, lr=0.01, eps=1e-3),
}


class Told(KnownDurations):
    """A pair in one loop takes `share` of its sequential time."""

    def __init__(self, share: float) -> None:
        self._share = share

    def lookup(self, call: Call) -> Timing | None:
        """Return the duration of a pair."""
        if call.name != "slipstream::side_by_side":
            return None
        return Timing(
            1e6 * (self._share if call.arguments[-1] else 1), 0, Provenance.MICROBENCHMARK
        )


def net(make: Callable[..., torch.optim.Optimizer], width: int = 64, rows: int = 24) -> Made:
    torch.manual_seed(0)
    wide = nn.Linear(width, 2 * width), nn.Linear(2 * width, width, bias=False)
    model = nn.Sequential(nn.Linear(width, width), nn.ReLU(), wide[0], nn.Tanh(), wide[1])
    batch = torch.randn(2, rows // 2, width), torch.randn(2, rows // 2, width)
    return model, batch, mse_loss, make(model.parameters())


def step(made: Made) -> float:
    model, (x, y), loss, optimizer = made
    optimizer.zero_grad()
    found: torch.Tensor = loss(model(x), y)
    found.backward()
    optimizer.step()
    return found.item()


def paired(made: Made) -> UpdateQueue:
    return interleave_updates([layer for layer in made[0] if isinstance(layer, nn.Linear)], made[3])


@functools.cache
def recorded(fused: bool = True, **settings: Any) -> Graph:
    make = functools.partial(torch.optim.AdamW, fused=fused, **settings)
    return profile(Workload.of(*net(make)), warmup=1, steps=3, threads=1)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_and_optimizer_state_equal_torchs(name: str) -> None:
    ours, theirs = net(OPTIMIZERS[name]), net(OPTIMIZERS[name])
    pair = paired(ours)
    for _ in range(4):
        assert step(ours) == pytest.approx(step(theirs), rel=1e-5)
    assert pair.pairs == 4 * 2
    for parameter, two in zip(ours[0].parameters(), theirs[0].parameters(), strict=True):
        torch.testing.assert_close(parameter, two, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(parameter.grad, two.grad, rtol=1e-4, atol=1e-6)
    one_state, two_state = ours[3].state_dict()["state"], theirs[3].state_dict()["state"]
    torch.testing.assert_close(one_state, two_state, rtol=1e-4, atol=1e-6)


def test_a_loaded_optimizer_continues_with_its_settings() -> None:
    ours, theirs = net(OPTIMIZERS["momentum"]), net(OPTIMIZERS["momentum"])
    paired(ours)
    for made in (ours, theirs):
        step(made)
        made[3].load_state_dict(copy.deepcopy(made[3].state_dict()))
        made[3].param_groups[0]["lr"] = 0.02
        step(made)
    for parameter, two in zip(ours[0].parameters(), theirs[0].parameters(), strict=True):
        torch.testing.assert_close(parameter, two)


def test_a_copy_is_plain_and_the_model_keeps_its_names() -> None:
    made = net(OPTIMIZERS["adamw"])
    names = list(made[0].state_dict())
    pair = paired(made)
    twin = copy.deepcopy(made[0])
    before = [parameter.clone() for parameter in twin.parameters()]
    mse_loss(twin(made[1][0]), made[1][1]).backward()
    assert all(torch.equal(a, b) for a, b in zip(before, twin.parameters(), strict=True))
    assert list(made[0].state_dict()) == names
    assert not pair.pairs


def test_a_second_backward_pass_before_the_step_is_an_error() -> None:
    made = net(OPTIMIZERS["descent"])
    paired(made)
    mse_loss(made[0](made[1][0]), made[1][1]).backward()
    with pytest.raises(SlipstreamError, match="second backward pass"):
        mse_loss(made[0](made[1][0]), made[1][1]).backward()


def test_a_pair_without_a_gain_is_left_to_torch() -> None:
    made, plain = net(OPTIMIZERS["adamw"]), net(OPTIMIZERS["adamw"])
    pair = interleave_updates(
        [layer for layer in made[0] if isinstance(layer, nn.Linear)], made[3], lambda *_: False
    )
    for _ in range(2):
        step(made), step(plain)
    assert not pair.pairs
    assert all(type(layer) is not InterleavedLinear for layer in made[0])
    for parameter, two in zip(made[0].parameters(), plain[0].parameters(), strict=True):
        assert torch.equal(parameter, two)


@pytest.mark.parametrize("kind", ["SGD", "Descent", "Adam", "AdamW"])
@pytest.mark.parametrize("together", [False, True])
def test_the_micro_benchmark_runs_the_pair(kind: str, together: bool) -> None:
    run = timer(pair_call(kind, 16, 32, 64, True, 1600, 8000, together))
    assert [run() for _ in range(3)] == [None] * 3


@pytest.mark.parametrize(("share", "faster"), [(0.8, True), (0.99, False)])
def test_it_predicts_useful_pairs_and_skips_others(share: float, faster: bool) -> None:
    graph, technique = recorded(), SideBySide()
    assert technique.why_not(graph) is None
    assert len(technique.required_timings(graph)) == 2 * 2
    after = technique.predict(graph, Context(Told(share)))  # type: ignore[arg-type]
    saved = float(graph.tasks.duration_ns.sum() - after.tasks.duration_ns.sum())
    assert (saved > 0) == faster
    message = after.edits[-1].what
    assert ("interleaved with gradients of 2 layers" in message) == faster
    assert (re.search(r"\bnone of 2\b", message) is None) == faster
    assert re.search(r"\bupdate\b.*\bhidden\b", message)


def test_it_follows_fused_optimizer_which_it_needs() -> None:
    graph = recorded(fused=False)
    assert "fused_optimizer" in str(SideBySide().why_not(graph))
    fused, _ = parse("fused_optimizer+side_by_side")
    after = combine(graph, [fused], Context(Told(1)))  # type: ignore[arg-type]
    assert SideBySide().why_not(after) is None


def test_unsupported_steps_have_a_reason() -> None:
    assert "amsgrad" in str(SideBySide().why_not(recorded(amsgrad=True)))
    assert "only=9" in str(SideBySide(only="9").why_not(recorded()))
    model, batch, loss, _ = net(OPTIMIZERS["adamw"])
    unknown = torch.optim.RMSprop(model.parameters())
    with pytest.raises(WorkloadError, match="RMSprop"):
        build_from((model, batch, loss, unknown), [SideBySide()], 0, "net")
    with pytest.raises(WorkloadError, match="your own step"):
        build_from({"model": model, "step": lambda: None}, [SideBySide()], 0, "net")


def test_applied_to_a_users_workload_it_trains_as_before() -> None:
    ours = build_from(net(OPTIMIZERS["momentum"]), [SideBySide()], 0, "net")
    theirs = build_from(net(OPTIMIZERS["momentum"]), [], 0, "net")
    for _ in range(3):
        ours.step(), theirs.step()
    for parameter, two in zip(ours.model.parameters(), theirs.model.parameters(), strict=True):
        torch.testing.assert_close(parameter, two, rtol=1e-5, atol=1e-6)
