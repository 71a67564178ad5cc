"""Parts of PriorityDDP in one process: guards, partial steps, positions, simulated choices."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch
from torch import nn

from slipstream.errors import CommunicationError, InvalidArgumentError, WorkloadError
from slipstream.ranks import lines
from slipstream.technique import parse
from slipstream.techniques.distributed.priority.channel import Channel
from slipstream.techniques.distributed.priority.layout import InFlight, Unit, cut, units_of
from slipstream.techniques.distributed.priority.learning import (
    Clock,
    Kind,
    first_reads,
    places,
    why_not_plain,
)
from slipstream.techniques.distributed.priority.plan import (
    PlanRequest,
    choose,
    core_share,
    link_share,
)
from slipstream.techniques.distributed.priority.rounds import Hooks, Rounds
from slipstream.techniques.distributed.priority.simulate import (
    ORDERS,
    Link,
    Shares,
    StepCosts,
    barrier,
    gated,
)
from slipstream.techniques.distributed.priority.updates import Updates
from slipstream.workload import BuiltWorkload
from slipstream_bench.rank_models import batch_of, model_of
from slipstream_bench.systems.priority.workloads import NAMES, Emulated, Layer, named

if TYPE_CHECKING:
    from slipstream.ranks.group import ProcessGroup


class Owner:
    def __init__(self) -> None:
        self.told = 0

    def before_read(self) -> None:
        self.told += 1


def test_reading_a_guarded_gradient_is_noted_and_its_shape_is_not() -> None:
    owner = Owner()
    flat = torch.arange(6.0)
    guard = InFlight.of(flat.view(2, 3), owner)
    parameter = nn.Parameter(torch.zeros(2, 3))
    parameter.grad = guard
    assert parameter.grad is guard
    assert (guard.shape, guard.dtype, guard.is_sparse, guard.numel()) == (
        (2, 3), torch.float32, False, 6
    )  # fmt: skip
    assert owner.told == 0
    assert type(guard + 1) is torch.Tensor
    assert owner.told == 1
    nn.utils.clip_grad_norm_([parameter], 1.0)
    assert owner.told > 1
    assert float(flat.norm()) == pytest.approx(1.0, rel=1e-5)
    reported = owner.told
    torch._foreach_mul_([guard, guard], 2.0)
    assert owner.told == reported + 2
    assert float(flat.norm()) == pytest.approx(4.0, rel=1e-5)


def test_a_unit_is_in_one_buffer_and_slices_cover_it_once() -> None:
    parameters = [nn.Parameter(torch.zeros(n)) for n in (700, 3, 0)]
    half = nn.Parameter(torch.zeros(10, dtype=torch.bfloat16))
    owner = Owner()
    units = units_of([[*parameters, half], [nn.Parameter(torch.zeros(()))]], owner)
    assert [unit.flat.numel() for unit in units] == [706, 11, 2]
    slices = cut(units, 256)
    assert [part.number for part in slices] == list(range(5))
    assert [part.end - part.begin for part in slices] == [256, 256, 194, 11, 2]
    assert slices[3].nbytes == 22
    units[0].views[1].fill_(5.0)
    assert units[0].flat[700:703].tolist() == [5.0] * 3
    units[0].flags.copy_(torch.tensor([2.0, 0.0, 1.0]))
    assert units[0].used() == [True, False, True]
    for parameter, guard in zip(parameters, units[0].guards, strict=True):
        parameter.grad = guard
    units[0].show()
    assert parameters[1].grad is None
    assert parameters[0].grad is units[0].views[0]
    with pytest.raises(InvalidArgumentError, match="complex"):
        units_of([[nn.Parameter(torch.zeros(1, dtype=torch.complex64))]], owner)


def test_shares_of_a_slice_cover_it() -> None:
    for numel, size in ((10, 4), (3, 4), (0, 2), (7, 1)):
        parts = lines.cut(torch.arange(float(numel)), lines.shares(numel, size))
        assert len(parts) == size
        assert torch.cat(parts).tolist() == list(range(numel))


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
        (torch.optim.AdamW, {"lr": 0.01, "amsgrad": True}),
        (torch.optim.RMSprop, {"lr": 0.01, "centered": True}),
        (torch.optim.Adagrad, {"lr": 0.01}),
        (torch.optim.NAdam, {"lr": 0.01}),
    ],
)
def test_a_step_in_parts_is_bitwise_equal_to_the_whole(make: Any, options: Any) -> None:
    def run(parts: bool) -> list[torch.Tensor]:
        drawn = torch.Generator().manual_seed(3)
        parameters = [nn.Parameter(torch.randn(n, generator=drawn)) for n in (4, 7, 1, 9)]
        groups = [{"params": parameters[:2]}, {"params": parameters[2:], "weight_decay": 0.1}]
        optimizer = make(groups, **options)
        updates = Updates(optimizer)
        assert updates.separable
        for step in range(5):
            gradients = [torch.randn(p.shape, generator=drawn) for p in parameters]
            if step == 2:
                gradients[1] = None  # type: ignore[call-overload]
            if parts:
                settings = updates.settings()
                optimizer.param_groups[0]["lr"] *= 0.5  # a scheduler, before any update
                for number in (3, 0, 2, 1):
                    updates.apply(settings, [(parameters[number], gradients[number])])
            else:
                for parameter, gradient in zip(parameters, gradients, strict=True):
                    parameter.grad = gradient
                updates.whole()
                optimizer.param_groups[0]["lr"] *= 0.5
        return parameters

    assert all(map(torch.equal, run(True), run(False)))


def test_a_failing_update_leaves_the_optimizer_consistent() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([parameter], 0.1)
    groups = optimizer.param_groups
    optimizer.register_step_pre_hook(_fail)
    updates = Updates(optimizer)
    assert not updates.separable
    with pytest.raises(ZeroDivisionError):
        updates.apply(updates.settings(), [(parameter, torch.ones(2))])
    assert optimizer.param_groups is groups
    assert parameter.grad is None


def _fail(*_: Any) -> None:
    raise ZeroDivisionError


class Odd(nn.Module):
    """Reads parameters of others, its own, and tied ones, not in order of registration."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 12, bias=False)
        self.attend = nn.MultiheadAttention(8, 2, batch_first=True)
        self.position = nn.Parameter(torch.zeros(8))
        self.table = nn.Embedding(12, 8)
        self.head.weight = self.table.weight
        self.rnn = nn.LSTM(8, 8, batch_first=True)
        self.idle = nn.Linear(2, 2)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids) + self.position
        x, _ = self.attend(x, x, x)
        x, _ = self.rnn(x)
        return self.head(x)


def test_positions_are_where_parameters_are_first_read() -> None:
    model = Odd()
    parameters = list(model.parameters())
    with first_reads(model, parameters) as read:
        model(torch.tensor([[1, 2]]))
    found = places(model, parameters, read)
    named = {id(p): n for n, p in model.named_parameters()}
    order = {next(n for n, m in model.named_modules() if m is module): [named[id(p)] for p in ps]
             for module, ps in found}  # fmt: skip
    assert list(order) == ["", "table", "attend", "rnn"]
    # Parameters that were never read are awaited at the very beginning.
    assert set(order[""]) == {"idle.weight", "idle.bias", "position"}
    assert order["table"] == ["head.weight"]
    assert "attend.out_proj.weight" in order["attend"]
    assert len(order["rnn"]) == 4
    assert why_not_plain(model) is None
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_the_clock_excludes_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 1.0, 3.0, 10.0, 13.0, 17.0, 20.0])
    monkeypatch.setattr(
        "slipstream.techniques.distributed.priority.learning.time.perf_counter", lambda: next(now)
    )
    used = iter([0.0, 2.0, 6.0])
    monkeypatch.setattr(
        "slipstream.techniques.distributed.priority.learning.time.thread_time", lambda: next(used)
    )
    clock = Clock()
    clock.begin()
    clock.mark(Kind.NEEDED, 0)
    clock.mark(Kind.READY, 0)
    clock.skip(5.0)
    clock.begin()
    clock.mark(Kind.NEEDED, 0)
    clock.mark(Kind.NEEDED, 0)
    clock.mark(Kind.READY, 0)
    clock.begin()
    kinds = [kind for kind, _, _ in clock.segments()]
    assert kinds == [Kind.NEEDED, Kind.READY, Kind.END]
    assert [s for *_, s in clock.segments()] == [2.0, 3.0, 2.5]
    assert clock.busy == pytest.approx(0.4)


@pytest.mark.parametrize("timed", [True, False])
def test_nothing_is_sent_while_computation_is_timed(timed: bool) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    rounds = Rounds(list(model.parameters()), 2, Updates(torch.optim.SGD(model.parameters(), 0.1)))
    rounds.lay_out(units_of([list(layer.parameters()) for layer in model], rounds))
    handed: list[tuple[int, bool]] = []

    class Noting:
        def begin(self) -> None:
            pass

        def hand_over(self, unit: Unit) -> None:
            handed.append((unit.number, all(all(other.handed) for other in rounds.units)))

    rounds.channel = Noting()  # type: ignore[assignment]
    rounds.clock = Clock() if timed else None
    Hooks(rounds).attach()
    model(torch.ones(1, 2)).sum().backward()
    # Number of the unit, and whether the backward pass has computed all others by then.
    assert handed == [(1, timed), (0, True)]


def test_a_second_backward_pass_does_not_modify_a_buffer_in_transfer() -> None:
    model = nn.Linear(2, 2)
    rounds = Rounds(list(model.parameters()), 2, Updates(torch.optim.SGD(model.parameters(), 0.1)))
    rounds.lay_out(units_of([list(model.parameters())], rounds))
    sent: list[torch.Tensor] = []
    seen: list[torch.Tensor] = []

    class Noting:
        def begin(self) -> None:
            for unit in rounds.units:
                unit.handed = [False] * len(unit.parameters)

        def hand_over(self, unit: Unit) -> None:
            sent.append(unit.flat.clone())

        def wait_for(self, units: list[Unit]) -> None:
            seen.append(units[0].flat.clone())

    rounds.channel = Noting()  # type: ignore[assignment]
    Hooks(rounds).attach()
    model(torch.ones(1, 2)).sum().backward()
    assert not seen
    model(torch.ones(1, 2)).sum().backward()
    # The first result is still that of the sent values.
    assert torch.equal(seen[0], sent[0])
    assert torch.equal(sent[1][:-2], (sent[0] + sent[0] / 2)[:-2])


def link(byte_s: float, message_s: float = 0.0) -> Link:
    equal = dict.fromkeys(ORDERS, message_s), dict.fromkeys(ORDERS, byte_s)
    return Link(*equal, message_s, byte_s)


def step_of(layers: list[Layer]) -> StepCosts:
    segments = []
    before = 0.0
    for number, layer in enumerate(layers):
        segments.append((Kind.NEEDED, number, before))
        before = layer.forward_s
    for number in reversed(range(len(layers))):
        segments.append((Kind.READY, number, before + layers[number].backward_s))
        before = 0.0
    segments.append((Kind.END, -1, 0.0))
    nbytes = [4 * layer.numel for layer in layers]
    return StepCosts(segments, nbytes, [0.0] * len(layers), [layer.numel for layer in layers])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("order", ORDERS)
def test_a_simulated_step_is_between_its_bound_and_the_sequential_time(
    name: str, order: str
) -> None:
    step = step_of(named(name, 0.1))
    compute, numbers = step.compute_s, sum(step.elements)
    assert compute == pytest.approx(0.1)
    for ratio in (1e-6, 0.5, 1.0, 20.0):
        communicate = ratio * compute
        taken = gated(step, link(communicate / numbers / 4), order, 50_000).step_s
        assert max(compute, communicate) <= taken * (1 + 1e-6)
        assert taken <= (compute + communicate) * (1 + 1e-6)
    buckets = [[(unit, float(step.nbytes[unit]))] for unit in step.released]
    theirs = barrier(step, link(compute / numbers / 4), buckets)
    ours = gated(step, link(compute / numbers / 4), "leader", 50_000).step_s
    assert ours <= theirs * (1 + 1e-6)


def test_two_layers_by_hand() -> None:
    # Forward 1 + 1, backward 2 + 2; the last layer's gradients take 4 s, the first's 1 s. They
    # are ready at 4 and 6 s. In order, the first layer's arrive at 8 or, if first, at 7.
    layers = [Layer(1, 1.0, 2.0), Layer(4, 1.0, 2.0)]
    step = step_of(layers)
    slow = link(0.25)
    assert barrier(step, slow, [[(1, 16.0)], [(0, 4.0)]]) == pytest.approx(9.0)
    # Two parameters of a layer are sent once each, in any unit.
    parts = [[(1, 8.0), (1, 8.0)], [(0, 4.0)]]
    assert barrier(step, slow, parts) == pytest.approx(9.0)
    assert barrier(step, slow, [[(1, 8.0)], [(1, 8.0), (0, 4.0)]]) == pytest.approx(9.0)
    # In slices of 1 s, one at a time: the last layer's two first until 6, the first layer's until
    # 7, then the others until 9. The first layer resumes at 7 and the last at 9, until 10, with
    # the backward pass starting at 2.
    taken = gated(step, slow, "leader", 1, 1)
    assert taken.step_s == pytest.approx(8.0)
    assert gated(step, link(0.26), "leader", 1, 1).order == (1, 2, 0, 3, 4)
    # Two at a time: the third leaves before the first layer's gradients are ready.
    assert gated(step, link(0.26), "leader", 1, 2).order == (1, 2, 3, 0, 4)
    # Unsliced: the first layer's gradients wait until 8, and arrive at 9.
    assert gated(step, slow, "leader", 4, 1).step_s == pytest.approx(9.0)


def test_slices_in_two_halves_share_a_link() -> None:
    # One layer of four slices of 1 s, ready together; all are sent in 4 s for any number in flight,
    # and with one in flight, also if its sum is awaited, since adding takes no time.
    step = step_of([Layer(4, 0.0, 0.0)])
    for order in ("leader", "static", "rs_ag"):
        for ahead in (1, 2, 8):
            assert gated(step, link(0.25), order, 1, ahead).step_s == pytest.approx(4.0)
    # Each direction carries other slices: half of them use each, then return on the other.
    for ahead in (1, 4):
        assert gated(step, link(0.25), "p2p", 1, ahead).step_s == pytest.approx(4.0)
    # All go out before any returns.
    assert gated(step, link(0.25), "rs_ag", 1, 1).order == (0, 1, 2, 3, 0, 1, 2, 3)


def test_computing_and_sending_slow_each_other() -> None:
    # As above, but while both run, a tenth of the rate remains, or all of it.
    layers = [Layer(1, 1.0, 2.0), Layer(4, 1.0, 2.0)]
    buckets = [[(1, 16.0)], [(0, 4.0)]]

    def link_with(shares: Shares) -> Link:
        every = {(order, 1): shares for order in (*ORDERS, "ddp")}
        return replace(link(0.25), contention=every)

    for busy, shares in ((0.0, Shares(0.1, 0.5)), (1.0, Shares())):
        step = replace(step_of(layers), busy=busy)
        assert gated(step, link_with(shares), "leader", 1, 1).step_s == pytest.approx(8.0)
        assert barrier(step, link_with(shares), buckets) == pytest.approx(9.0)
    step = replace(step_of(layers), busy=1.0)
    slow = link_with(Shares(link=0.1))
    # From 4 to 6 the first bucket gets 0.2 s of its 4; 4.8 remain after the computation.
    assert barrier(step, slow, buckets) == pytest.approx(10.8)
    # All orders are near the sequential time of 11, and none is beyond.
    for order in ORDERS:
        assert 9.5 < gated(step, slow, order, 1, 1).step_s <= 11.0 + 1e-6
    half = replace(step, busy=0.5)
    assert barrier(half, slow, buckets) == pytest.approx(6.0 + 5.0 - 2.0 * 0.55)
    # Computation at half its pace: the first layer's gradients are ready at 8, when the last
    # layer's have just been sent.
    slowed = link_with(Shares(core=0.5))
    assert barrier(step, slowed, buckets) == pytest.approx(9.0)
    # For a contention between the measured ones, the nearest measured one is used.
    assert gated(step, slowed, "leader", 4, 3).step_s == gated(step, slowed, "leader", 4, 1).step_s


def test_the_remaining_rate_during_computation() -> None:
    # Sent while all computed, in 4 times its time; nothing sent; as fast as alone.
    assert link_share(1.0, 4.0, 4.0) == pytest.approx(0.25)
    assert link_share(1.0, 3.0, 4.0) == pytest.approx(0.01)
    assert link_share(1.0, 1.0, 1.0) == pytest.approx(1.0)
    # Half of it within three times its time, the other half afterwards.
    assert link_share(1.0, 3.0, 3.5) == pytest.approx(0.5 / 3)
    # 10 matmuls per second alone; as many in four seconds, faster than alone, hardly any.
    assert core_share((10, 1.0), (10, 4.0)) == pytest.approx(0.25)
    assert core_share((20, 2.0), (50, 4.0)) == 1.0
    assert core_share((1000, 1.0), (1, 4.0)) == pytest.approx(0.01)


def test_a_channel_that_closes_or_fails_starts_no_round() -> None:
    units = units_of([[nn.Parameter(torch.ones(4))]], Owner())
    cut(units, 100)
    for ends in ("close", "fail"):
        ranks = SimpleNamespace(explain=lambda error, where: error)
        channel = Channel(cast("ProcessGroup", ranks), units, 1)
        channel.begin()
        assert channel.round_begun(0)
        if ends == "close":
            channel.close()
        else:
            channel.fail(CommunicationError("lost"))
        assert not channel.round_begun(0)


def test_choices() -> None:
    layers = named("tail-heavy", 0.366)
    step = step_of(layers)
    units = units_of([[nn.Parameter(torch.zeros(layer.numel - 1))] for layer in layers], Owner())
    free = PlanRequest(None, None, None)
    numbers = sum(step.elements)
    plans = choose(free, step, link(0.366 / numbers / 4, 0.001), units)
    chosen = plans[0]
    # Plans predicted within 5 % are tried, and the one they have to beat.
    ours = [plan.predicted_s[plan.name] for plan in plans[:-1]]
    assert 2 <= len(ours) <= 4
    assert max(ours) <= 1.05 * min(ours)
    assert plans[-1].name == "ddp:25"
    assert chosen.order == "leader"
    assert chosen.slice_elems == 50_000
    assert chosen.credit_bytes == 400_000
    assert chosen.predicted_s["leader:50000"] < 0.85 * chosen.predicted_s["ddp:1"]
    assert [plan.order for plan in choose(free, step, link(1e-12), units)] == ["ddp"]
    # Small buckets if the last one would be exposed; the largest if it does not matter.
    even = step_of(named("uniform", 0.2))
    equal = units_of([[nn.Parameter(torch.zeros(60_000 - 1))]] * 16, Owner())
    costly = dict.fromkeys(ORDERS, 1.0)
    slow = Link(costly, costly, 1e-4, 0.1 / 960_000 / 4)
    assert [plan.name for plan in choose(free, even, slow, equal)] == ["ddp:0.25", "ddp:25"]
    assert [plan.name for plan in choose(free, step, link(1e-12), units)] == ["ddp:25"]
    # A message costs more than is gained.
    assert choose(free, step, link(1e-9, 0.1), units)[0].order == "ddp"
    (fixed,) = choose(PlanRequest("static", 30_000, 240_000), step, link(1e-8), units)
    assert (fixed.order, fixed.slice_elems, fixed.credit_bytes) == ("static", 30_000, 240_000)
    assert sorted(fixed.static) == list(range(len(cut(units, 30_000))))


def test_ddp_sends_every_parameter_once_even_if_several_are_awaited_together() -> None:
    # Weight and bias of each layer, awaited together, in one bucket that leaves after all of them.
    layers = [Layer(1000, 0.0, 0.001)] * 3
    groups = [[nn.Parameter(torch.zeros(990)), nn.Parameter(torch.zeros(8))] for _ in layers]
    step = step_of(layers)
    found = choose(PlanRequest(None, None, None), step, link(1e-6), units_of(groups, Owner()))[0]
    assert found.predicted_s["ddp:25"] == pytest.approx(0.003 + 3 * 998 * 4e-6)


def test_the_technique_explains_how_to_start() -> None:
    (technique,) = parse("priority_sync:4,slice=50000")
    with pytest.raises(WorkloadError, match="needs 4 processes"):
        technique.apply(BuiltWorkload(None, None, None, None))  # type: ignore[arg-type, call-arg]
    change = technique.code(None)  # type: ignore[arg-type]
    assert change is not None
    assert "PriorityDDP(model, optimizer, slice_elems=50000)" in change.note


def test_models_of_the_benches_train() -> None:
    emulated = Emulated([Layer(5, 0.0, 0.0), Layer(7, 0.0, 0.0)])
    emulated(torch.ones(1, requires_grad=True)).sum().backward()
    assert [layer.weight.grad.numel() for layer in emulated.layers] == [5, 7]
    spec = [3, 8, 0.0, 0.0, 2]
    sleeping = model_of(spec)
    sleeping(batch_of(spec, 0)).sum().backward()
    assert all(parameter.grad is not None for parameter in sleeping.parameters())
