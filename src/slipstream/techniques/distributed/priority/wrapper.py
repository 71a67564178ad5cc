"""`PriorityDDP`: DistributedDataParallel that waits for each layer where it is needed.

Gradients travel in slices, the most urgent first. ``optimizer.step()`` returns at once; each layer
is updated when its gradients are there, at the latest where the next forward pass comes to it. The
sequence of weights is that of synchronous training, to the bit for two ranks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from slipstream.errors import InvalidArgumentError, UsageError
from slipstream.ranks.group import (
    PATIENCE_S,
    TIMEOUT_S,
    ProcessGroup,
    need_processes,
)
from slipstream.techniques.distributed.exposed import ExposedTimes, watch_buckets
from slipstream.techniques.distributed.gradients import DEFAULT_MIB
from slipstream.techniques.distributed.optimizers import EXCHANGES, need_optimizer
from slipstream.techniques.distributed.priority import learning, plan
from slipstream.techniques.distributed.priority.autotune import Autotune
from slipstream.techniques.distributed.priority.bucketed import replicated
from slipstream.techniques.distributed.priority.layout import Unit, cut, units_of
from slipstream.techniques.distributed.priority.learning import Clock
from slipstream.techniques.distributed.priority.plan import Asked, SlicePlan
from slipstream.techniques.distributed.priority.rounds import Hooks, Rounds
from slipstream.techniques.distributed.priority.simulate import AHEAD, DDP, ORDERS, Link, StepCosts
from slipstream.techniques.distributed.priority.updates import Updates

# Steps that are timed before a plan is made; of the last one the end is not seen.
_TIMED = 4
_LEAST_SLICE = 256
_TAKEN = "slipstream_priority"  # noted at a model that is in a PriorityDDP
_REPLACED = ("step", "zero_grad", "add_param_group")


class PriorityDDP(nn.Module):
    """A model whose replicas are kept equal, and an optimizer whose steps come layer by layer.

    The first steps learn what the forward pass needs when; then a plan is made, the same on all
    ranks, which has to prove itself for some steps beside DistributedDataParallel. Whoever reads
    weights between steps other than through the model's forward pass calls `synchronize` before;
    checkpoints, `parameters` and `eval` of this module do it by themselves.
    Gradients that are read before ``optimizer.step()``, as clipping does, are waited for.

    Args:
        model: on a processor; its weights and buffers become those of rank 0.
        optimizer: of its parameters; `step` and `zero_grad` of this very object are replaced.
        slice_elems: elements of a slice, at least 256; ``auto``: by simulation.
        credit: bytes that may be on their way at once and so cannot be overtaken; ``auto``: two
            slices, or eight where ranks compute on all cores and that is faster.
        order: ``leader``, ``p2p``, ``rs_ag``, ``static``; ``auto``: what simulation finds fastest
            and some steps confirm, and DistributedDataParallel where none is faster.
        process_group: the processes; None: all.
        timeout_s: how long a rank waits for the others.
        patience_s: how long, after a failure, all are given to say that they live.

    Attributes:
        plan: what was chosen; None in the first steps.
        learned: the step and the link that it was chosen for.

    Raises:
        InvalidArgumentError: an argument that is none of these, a compiled model, parameters that
            cannot be exchanged, an optimizer that evaluates the model itself (LBFGS).
        UsageError: no process group is initialised, or the model or the optimizer is taken already.
        CommunicationError: ranks disagree on the model or the settings. Later, from the forward
            pass, ``optimizer.step`` or `synchronize`: a rank ended, hung or failed.

    Source: Jayarajan et al., SysML 2019, 1905.03960; Peng et al., SOSP 2019 (credits).
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        slice_elems: int | str = "auto",
        credit: int | str = "auto",
        order: str = "auto",
        process_group: Any = None,
        timeout_s: float = TIMEOUT_S,
        patience_s: float = PATIENCE_S,
    ) -> None:
        super().__init__()
        self._asked = _asked(slice_elems, credit, order)
        _check(model)
        need_optimizer(optimizer)
        updates = Updates(optimizer)
        self.module = model
        self.plan: SlicePlan | None = None
        self.learned: tuple[StepCosts, Link] | None = None
        self._parent = process_group
        self._ranks = ProcessGroup(process_group, timeout_s, patience_s, "priority")
        self._trained = [one for one in model.parameters() if one.requires_grad]
        self._rounds = Rounds(self._trained, self._ranks.size, updates)
        self._hooks = Hooks(self._rounds)
        self._saving: list[Any] = []  # hooks on what checkpoints are made of
        self._autotune: Autotune | None = None
        self._unused = self._through_ddp = False
        self._ddp: list[DistributedDataParallel] = []  # in a list, for it is no submodule
        self._read: list[tuple[nn.Parameter, nn.Module]] = []
        self._steps, self._fresh = 0, True
        self._finalizer: Any = None
        if self._ranks.size > 1 and self._trained:
            self._start()
            self._take_over(optimizer)

    # What the user calls.

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """The model's forward pass; each layer waits for its own weights."""
        if self._fresh and torch.is_grad_enabled():
            self._fresh = False
            for watch in (self._rounds.clock, self._autotune):
                if watch is not None:
                    watch.begin()
        if self._ddp:
            self._through_ddp |= torch.is_grad_enabled() and self._rounds.exchanging
            return self._ddp[0](*inputs, **named)
        learns = self._rounds.channel is not None and not self._steps and not self._read
        if not (learns and torch.is_grad_enabled()):
            return self.module(*inputs, **named)
        with learning.first_reads(self.module, self._trained) as self._read:
            return self.module(*inputs, **named)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes in it only accumulate, here."""
        with contextlib.ExitStack() as stack:
            if self._ddp:
                stack.enter_context(self._ddp[0].no_sync())
            before, self._rounds.exchanging = self._rounds.exchanging, False
            try:
                yield
            finally:
                self._rounds.exchanging = before

    def synchronize(self) -> contextlib.AbstractContextManager[Self]:
        """Wait for all gradients on their way, and make all updates of the last step.

        Returns:
            Something for ``with``, in which weights may be read: they stay until the next step.
        """
        self._rounds.synchronize()
        return contextlib.nullcontext(self)

    def close(self) -> None:
        """Give the optimizer back and end the threads; the model is a plain one again."""
        self._rounds.synchronize()
        self._let_go()
        vars(self._rounds.updates.optimizer).pop(EXCHANGES, None)
        vars(self.module).pop(_TAKEN, None)
        self._autotune = None
        self._end_ddp()

    @property
    def settled(self) -> bool:
        """Whether there is a plan, and it stays; or nothing to exchange."""
        return self._finalizer is None or (self.plan is not None and self._autotune is None)

    def tell_exposed(self, exposed: ExposedTimes | None) -> None:
        """Tell `exposed` of every stretch in which training waits, from now on; None: nobody."""
        self._rounds.exposed = exposed
        for one in self._ddp:
            watch_buckets(one, exposed)

    def train(self, mode: bool = True) -> Self:
        """As a module's; before evaluation, all updates are made."""
        if not mode:
            self._rounds.settle_updates()
        return super().train(mode)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """As a module's, all updates made."""
        self._rounds.settle_updates()
        return super().named_parameters(prefix, recurse, remove_duplicate)

    # How it begins and ends.

    def _start(self) -> None:
        ranks, rounds = self._ranks, self._rounds
        named = [(n, p) for n, p in self.module.named_parameters() if p.requires_grad]
        ranks.agree(str(self._asked), "setting of PriorityDDP")
        ranks.agree(", ".join(f"{n} {p.dtype} {list(p.shape)}" for n, p in named), "model")
        ranks.agree(type(rounds.updates.optimizer).__name__, "optimizer")
        with torch.no_grad():
            for tensor in (*self.module.parameters(), *self.module.buffers()):
                plain = tensor.detach().contiguous()
                dist.broadcast(plain, group_src=0, group=ranks.group)
                tensor.copy_(plain)
        self._lay_out([[one] for one in self._trained])
        self._hooks.put_on()
        for module in self.module.modules():
            hook: Any = module.register_state_dict_pre_hook
            self._saving.append(hook(lambda *_: rounds.settle_updates()))

    def _take_over(self, optimizer: torch.optim.Optimizer) -> None:
        rounds = self._rounds

        def step(optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            return self._step(closure)

        def zero_grad(optimizer: torch.optim.Optimizer, set_to_none: bool = True) -> None:
            if rounds.channel is None:
                type(optimizer).zero_grad(optimizer, set_to_none)
                return
            if not set_to_none and rounds.idle_now():
                # Whether others have a gradient where this rank has none is known on arrival.
                rounds.settle_updates()
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    # Never zero what may be on its way.
                    keep = parameter.grad is not None and not set_to_none
                    parameter.grad = torch.zeros_like(parameter) if keep else None

        def add_param_group(optimizer: torch.optim.Optimizer, group: Any) -> None:
            raise UsageError("PriorityDDP takes no more parameters", remedy="wrap the model last")

        # It notes that it was called, as the wrapper that a scheduler would put around it.
        step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        for function in (step, zero_grad, add_param_group):
            setattr(optimizer, function.__name__, types.MethodType(function, optimizer))
        setattr(optimizer, EXCHANGES, "is in a PriorityDDP")
        vars(self.module)[_TAKEN] = True
        self._saving += [
            optimizer.register_state_dict_pre_hook(lambda *_: rounds.settle_updates()),
            optimizer.register_load_state_dict_pre_hook(lambda *_: rounds.settle_updates()),
        ]

    def _let_go(self) -> None:
        """No hooks, no threads, and the optimizer's own methods."""
        for name in _REPLACED:
            vars(self._rounds.updates.optimizer).pop(name, None)
        for hook in self._saving:
            hook.remove()
        self._saving = []
        self._hooks.take_off()
        if self._rounds.channel is not None:
            self._finalizer()
            self._rounds.channel = None

    def _lay_out(self, groups: Sequence[Sequence[nn.Parameter]]) -> None:
        """Units of these groups, the last one sent first until there is a plan."""
        units = units_of(groups, self._rounds)
        self._rounds.lay_out(units)
        size = self._asked.slice_elems or plan.PAPERS
        slices = cut(units, size)
        order = [one.number for unit in reversed(units) for one in unit.slices]
        credit = AHEAD * max(one.nbytes for one in slices)
        self._use(SlicePlan("static", size, credit_bytes=credit, static=tuple(order)), [])

    def _use(self, chosen: SlicePlan, released: Sequence[int]) -> None:
        if self._finalizer is not None:
            self._finalizer()
        channel = plan.channel(self._ranks, self._rounds.units, chosen, released)
        self._rounds.channel = channel
        # At the end of the program the others may still need what is on its way.
        self._finalizer = weakref.finalize(self, channel.drain)

    # The first steps.

    def _step(self, closure: Callable[[], Any] | None) -> Any:
        loss, ended = self._rounds.step(closure)
        if ended or self._through_ddp:
            self._steps, self._fresh, self._through_ddp = self._steps + 1, True, False
            with self._ranks.named_errors("the plan of PriorityDDP"):
                if self._steps == 1:
                    self._learn_places()
                elif self._steps == 1 + _TIMED:
                    self._make_plan()
                elif self._autotune is not None and self._autotune.turn_over:
                    self._next_turn(self._autotune)
        return loss

    def _learn_places(self) -> None:
        """Where the forward pass needs which parameters: rank 0's, for all."""
        names = {id(module): name for name, module in self.module.named_modules()}
        numbers = {id(one): n for n, one in enumerate(self._trained)}
        places = learning.places(self.module, self._trained, self._read)
        told = [(names[id(m)], [numbers[id(p)] for p in group]) for m, group in places]
        told = self._from_first(told)
        self._lay_out([[self._trained[n] for n in group] for _, group in told])
        rounds = self._rounds
        waits: dict[str, list[Unit]] = {}
        for name, group in told:
            waits[name] = [rounds.at[id(self._trained[n])][0] for n in group]
        # Each module also waits for its own parameters, should it come to them earlier than then.
        for name, module in self.module.named_modules():
            parameters = module.parameters(recurse=False)
            waits.setdefault(name, []).extend(
                rounds.at[id(p)][0] for p in parameters if id(p) in rounds.at
            )
        self._hooks.wait_at([
            (self.module.get_submodule(name), list(dict.fromkeys(units)))
            for name, units in waits.items() if units
        ])  # fmt: skip
        rounds.clock, rounds.update_s = Clock(), []

    def _make_plan(self) -> None:
        rounds, asked = self._rounds, self._asked
        assert rounds.clock is not None
        most = torch.tensor([float(rounds.idle), rounds.clock.busy])
        dist.all_reduce(most, dist.ReduceOp.MAX, group=self._ranks.group)
        self._unused, busy = bool(most[0]), float(most[1])
        orders = [asked.order] if asked.order else ORDERS
        link = plan.measure_link(self._ranks, orders, busy >= plan.BUSY)
        step = StepCosts.of(rounds.clock.segments(), rounds.units, rounds.update_s, busy)
        rounds.clock = None
        mine = (plan.choose(asked, step, link, rounds.units), step, link)
        plans, step, link = self._from_first(mine)
        self.learned = (step, link)
        rounds.in_parts = True
        if len(plans) > 1:
            self._autotune = Autotune(plans, step.compute_s)
        self._follow(plans[0])

    def _next_turn(self, autotune: Autotune) -> None:
        """Another plan trains; or all have, and one goes on."""
        self._rounds.synchronize()
        autotune.next()
        if not autotune.over:
            self._follow(autotune.current)
            return
        self._autotune = None
        fastest, measured_s = self._from_first((autotune.fastest(), autotune.measured_s))
        self._follow(dataclasses.replace(fastest, measured_s=measured_s))

    def _follow(self, chosen: SlicePlan) -> None:
        """Train by this plan from the next step on."""
        stays = bool(self._ddp) and self.plan is not None and self.plan.name == chosen.name
        self.plan = chosen
        if not stays:
            self._end_ddp()
        if chosen.order != DDP:
            assert self.learned is not None
            self._hooks.take_off()
            self._hooks.put_on()
            self._use(chosen, self.learned[0].released)
            return
        self._hooks.take_off()
        if self._autotune is None:
            self._let_go()
        if not stays:
            cap = None if chosen.bucket_mb == DEFAULT_MIB else chosen.bucket_mb
            self._ddp.append(replicated(self.module, self._ranks, self._parent, cap, self._unused))
            self.tell_exposed(self._rounds.exposed)

    def _end_ddp(self) -> None:
        if self._ddp:
            self._ddp.clear()
            # With it goes what it has hooked to the parameters.
            gc.collect()

    def _from_first(self, value: Any) -> Any:
        """Rank 0's `value`, on all ranks."""
        told = [value]
        dist.broadcast_object_list(told, group_src=0, group=self._ranks.group)
        return told[0]


def _check(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise InvalidArgumentError("model", f"is a {type(model).__name__}, not a module")
    reason = learning.why_not_plain(model)
    if reason is not None:
        raise InvalidArgumentError("model", reason, remedy="give the plain module")
    if _TAKEN in vars(model):
        raise UsageError("the model is in another PriorityDDP already", remedy="close() that one")
    need_processes("PriorityDDP")


def _asked(slice_elems: int | str, credit: int | str, order: str) -> Asked:
    if order not in ("auto", *ORDERS):
        raise InvalidArgumentError(
            "order", f"'{order}' is none", remedy="auto, " + ", ".join(ORDERS)
        )
    for name, value, least in (("slice_elems", slice_elems, _LEAST_SLICE), ("credit", credit, 1)):
        number = isinstance(value, int) and not isinstance(value, bool)
        if value != "auto" and not (number and int(value) >= least):
            raise InvalidArgumentError(
                name, f"{value!r} is not a number from {least} on", remedy="or auto"
            )
    return Asked(
        None if order == "auto" else order,
        None if slice_elems == "auto" else int(slice_elems),
        None if credit == "auto" else int(credit),
    )
