"""`PriorityDDP`: data parallelism in which the forward pass waits for single layers.

Gradients are exchanged in slices, the most urgent first. ``optimizer.step()`` returns immediately;
each layer is updated once its gradients have arrived, at the latest when the next forward pass
reaches it. Weights are those of synchronous training, bitwise for two ranks.
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
from slipstream.techniques.distributed.priority.plan import PlanRequest, SlicePlan
from slipstream.techniques.distributed.priority.rounds import Hooks, Rounds
from slipstream.techniques.distributed.priority.simulate import AHEAD, DDP, ORDERS, Link, StepCosts
from slipstream.techniques.distributed.priority.updates import Updates

# Steps that are timed before planning; the end of the last one is not recorded.
_TIMED = 4
_MIN_SLICE = 256
_WRAPPED = "slipstream_priority"  # attribute of a model in a PriorityDDP
_REPLACED_METHODS = ("step", "zero_grad", "add_param_group")


class PriorityDDP(nn.Module):
    """Wrapper of a model and its optimizer that exchanges gradients by priority.

    The first steps record when the forward pass needs which parameters. Then ranks agree on a plan,
    which must be faster than DistributedDataParallel in some timed steps. Call `synchronize` before
    reading weights between steps; the forward pass, checkpoints, `parameters` and `eval` of this
    module do so themselves. Reading gradients before ``optimizer.step()``, as clipping does, waits
    for them.

    Args:
        model: a model on the CPU; its weights and buffers become those of rank 0.
        optimizer: optimizer of its parameters; its `step` and `zero_grad` are replaced.
        slice_elems: elements per slice, at least 256; ``auto`` for the best by simulation.
        credit: maximum bytes in transit, which later slices cannot overtake; ``auto`` for two
            slices, or eight if ranks compute on all cores and that is faster.
        order: ``leader``, ``p2p``, ``rs_ag``, ``static``, or ``auto``: the fastest by simulation
            and in some timed steps, or DistributedDataParallel if none is faster.
        process_group: the process group; None for all processes.
        timeout_s: how long a rank waits for others, in seconds.
        patience_s: how long ranks may take to respond after a failure, in seconds.

    Attributes:
        plan: the chosen plan; None in the first steps.
        learned: the step and the link for which the plan was chosen.

    Raises:
        InvalidArgumentError: an argument is invalid, the model is compiled, parameters cannot be
            exchanged, or the optimizer evaluates the model itself (LBFGS).
        UsageError: no process group is initialised, or the model or the optimizer is wrapped
            already.
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
        self._request = _plan_request(slice_elems, credit, order)
        _check(model)
        need_optimizer(optimizer)
        updates = Updates(optimizer)
        self.module = model
        self.plan: SlicePlan | None = None
        self.costs: tuple[StepCosts, Link] | None = None
        self._parent = process_group
        self._ranks = ProcessGroup(process_group, timeout_s, patience_s, "priority")
        self._trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._rounds = Rounds(self._trained, self._ranks.size, updates)
        self._hooks = Hooks(self._rounds)
        self._saving: list[Any] = []  # state_dict hooks
        self._autotune: Autotune | None = None
        self._unused = self._through_ddp = False
        self._ddp: list[DistributedDataParallel] = []  # a list, so that it is not a submodule
        self._read: list[tuple[nn.Parameter, nn.Module]] = []
        self._steps, self._fresh = 0, True
        self._finalizer: Any = None
        if self._ranks.size > 1 and self._trained:
            self._start()
            self._replace_methods(optimizer)

    # Public methods.

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Run the model's forward pass; each layer waits for its weights."""
        if self._fresh and torch.is_grad_enabled():
            self._fresh = False
            for watch in (self._rounds.clock, self._autotune):
                if watch is not None:
                    watch.begin()
        if self._ddp:
            self._through_ddp |= torch.is_grad_enabled() and self._rounds.exchanging
            return self._ddp[0](*inputs, **named)
        tracing = self._rounds.channel is not None and not self._steps and not self._read
        if not (tracing and torch.is_grad_enabled()):
            return self.module(*inputs, **named)
        with learning.first_reads(self.module, self._trained) as self._read:
            return self.module(*inputs, **named)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within the context, only accumulate gradients, on this rank."""
        with contextlib.ExitStack() as stack:
            if self._ddp:
                stack.enter_context(self._ddp[0].no_sync())
            before, self._rounds.exchanging = self._rounds.exchanging, False
            try:
                yield
            finally:
                self._rounds.exchanging = before

    def synchronize(self) -> contextlib.AbstractContextManager[Self]:
        """Wait for all gradients, and apply all updates of the last step.

        Returns:
            A context manager that yields this module; weights do not change until the next step.
        """
        self._rounds.synchronize()
        return contextlib.nullcontext(self)

    def close(self) -> None:
        """Restore the optimizer and the model, and end the threads."""
        self._rounds.synchronize()
        self._detach()
        vars(self._rounds.updates.optimizer).pop(EXCHANGES, None)
        vars(self.module).pop(_WRAPPED, None)
        self._autotune = None
        self._end_ddp()

    @property
    def is_plan_final(self) -> bool:
        """Whether the plan is final, or there is nothing to exchange."""
        return self._finalizer is None or (self.plan is not None and self._autotune is None)

    def report_exposed(self, exposed: ExposedTimes | None) -> None:
        """Report every interval in which training waits to `exposed`; None to stop."""
        self._rounds.exposed = exposed
        for replica in self._ddp:
            watch_buckets(replica, exposed)

    def train(self, mode: bool = True) -> Self:
        """Set the mode like ``nn.Module.train``; before evaluation, apply all updates."""
        if not mode:
            self._rounds.settle_updates()
        return super().train(mode)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Return parameters like ``nn.Module``, after all updates are applied."""
        self._rounds.settle_updates()
        return super().named_parameters(prefix, recurse, remove_duplicate)

    # Initialisation and shutdown.

    def _start(self) -> None:
        ranks, rounds = self._ranks, self._rounds
        named = [(n, p) for n, p in self.module.named_parameters() if p.requires_grad]
        ranks.agree(str(self._request), "setting of PriorityDDP")
        ranks.agree(", ".join(f"{n} {p.dtype} {list(p.shape)}" for n, p in named), "model")
        ranks.agree(type(rounds.updates.optimizer).__name__, "optimizer")
        with torch.no_grad():
            for tensor in (*self.module.parameters(), *self.module.buffers()):
                dense = tensor.detach().contiguous()
                dist.broadcast(dense, group_src=0, group=ranks.group)
                tensor.copy_(dense)
        self._lay_out([[parameter] for parameter in self._trained])
        self._hooks.attach()
        for module in self.module.modules():
            hook: Any = module.register_state_dict_pre_hook
            self._saving.append(hook(lambda *_: rounds.settle_updates()))

    def _replace_methods(self, optimizer: torch.optim.Optimizer) -> None:
        rounds = self._rounds

        def step(optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            return self._step(closure)

        def zero_grad(optimizer: torch.optim.Optimizer, set_to_none: bool = True) -> None:
            if rounds.channel is None:
                type(optimizer).zero_grad(optimizer, set_to_none)
                return
            if not set_to_none and rounds.idle_now():
                # Other ranks may have a gradient that this rank has not, which is known on arrival.
                rounds.settle_updates()
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    # A new tensor, because the old one may be in transit.
                    zeroed = parameter.grad is not None and not set_to_none
                    parameter.grad = torch.zeros_like(parameter) if zeroed else None

        def add_param_group(optimizer: torch.optim.Optimizer, group: Any) -> None:
            raise UsageError("PriorityDDP cannot add parameters", remedy="add them before wrapping")

        # It records its calls itself, so that a scheduler does not wrap it.
        step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        for function in (step, zero_grad, add_param_group):
            setattr(optimizer, function.__name__, types.MethodType(function, optimizer))
        setattr(optimizer, EXCHANGES, "is in a PriorityDDP")
        vars(self.module)[_WRAPPED] = True
        self._saving += [
            optimizer.register_state_dict_pre_hook(lambda *_: rounds.settle_updates()),
            optimizer.register_load_state_dict_pre_hook(lambda *_: rounds.settle_updates()),
        ]

    def _detach(self) -> None:
        """Remove hooks and threads, and restore the optimizer's methods."""
        for name in _REPLACED_METHODS:
            vars(self._rounds.updates.optimizer).pop(name, None)
        for hook in self._saving:
            hook.remove()
        self._saving = []
        self._hooks.detach()
        if self._rounds.channel is not None:
            self._finalizer()
            self._rounds.channel = None

    def _lay_out(self, groups: Sequence[Sequence[nn.Parameter]]) -> None:
        """Create units of these groups; until there is a plan, the last is sent first."""
        units = units_of(groups, self._rounds)
        self._rounds.lay_out(units)
        size = self._request.slice_elems or plan.PAPER_ELEMS
        slices = cut(units, size)
        order = [slice_.number for unit in reversed(units) for slice_ in unit.slices]
        credit = AHEAD * max(slice_.nbytes for slice_ in slices)
        self._use(SlicePlan("static", size, credit_bytes=credit, static=tuple(order)), [])

    def _use(self, chosen: SlicePlan, released: Sequence[int]) -> None:
        if self._finalizer is not None:
            self._finalizer()
        channel = plan.channel(self._ranks, self._rounds.units, chosen, released)
        self._rounds.channel = channel
        # At exit, other ranks may still need slices in transit.
        self._finalizer = weakref.finalize(self, channel.drain)

    # Planning in the first steps.

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
                    self._next_plan(self._autotune)
        return loss

    def _learn_places(self) -> None:
        """Group parameters by where the forward pass of rank 0 needs them, on all ranks."""
        names = {id(module): name for name, module in self.module.named_modules()}
        numbers = {id(parameter): n for n, parameter in enumerate(self._trained)}
        places = learning.places(self.module, self._trained, self._read)
        shared = [(names[id(m)], [numbers[id(p)] for p in group]) for m, group in places]
        shared = self._broadcast(shared)
        self._lay_out([[self._trained[n] for n in group] for _, group in shared])
        rounds = self._rounds
        waits: dict[str, list[Unit]] = {}
        for name, group in shared:
            waits[name] = [rounds.at[id(self._trained[n])][0] for n in group]
        # Each module also waits for its own parameters, in case it runs earlier than recorded.
        for name, module in self.module.named_modules():
            parameters = module.parameters(recurse=False)
            waits.setdefault(name, []).extend(
                rounds.at[id(p)][0] for p in parameters if id(p) in rounds.at
            )
        self._hooks.set_gates([
            (self.module.get_submodule(name), list(dict.fromkeys(units)))
            for name, units in waits.items() if units
        ])  # fmt: skip
        rounds.clock, rounds.update_s = Clock(), []

    def _make_plan(self) -> None:
        rounds, request = self._rounds, self._request
        assert rounds.clock is not None
        maxima = torch.tensor([float(rounds.idle), rounds.clock.busy])
        dist.all_reduce(maxima, dist.ReduceOp.MAX, group=self._ranks.group)
        self._unused, busy = bool(maxima[0]), float(maxima[1])
        orders = [request.order] if request.order else ORDERS
        link = plan.measure_link(self._ranks, orders, busy >= plan.BUSY)
        step = StepCosts.of(rounds.clock.segments(), rounds.units, rounds.update_s, busy)
        rounds.clock = None
        choice = (plan.choose(request, step, link, rounds.units), step, link)
        plans, step, link = self._broadcast(choice)
        self.costs = (step, link)
        rounds.in_parts = True
        if len(plans) > 1:
            self._autotune = Autotune(plans, step.compute_s)
        self._follow(plans[0])

    def _next_plan(self, autotune: Autotune) -> None:
        """Continue with the next plan, or with the fastest once all are timed."""
        self._rounds.synchronize()
        autotune.next()
        if not autotune.over:
            self._follow(autotune.current)
            return
        self._autotune = None
        fastest, measured_s = self._broadcast((autotune.fastest(), autotune.measured_s))
        self._follow(dataclasses.replace(fastest, measured_s=measured_s))

    def _follow(self, chosen: SlicePlan) -> None:
        """Use this plan from the next step on."""
        unchanged = bool(self._ddp) and self.plan is not None and self.plan.name == chosen.name
        self.plan = chosen
        if not unchanged:
            self._end_ddp()
        if chosen.order != DDP:
            assert self.costs is not None
            self._hooks.detach()
            self._hooks.attach()
            self._use(chosen, self.costs[0].released)
            return
        self._hooks.detach()
        if self._autotune is None:
            self._detach()
        if not unchanged:
            cap = None if chosen.bucket_mb == DEFAULT_MIB else chosen.bucket_mb
            self._ddp.append(replicated(self.module, self._ranks, self._parent, cap, self._unused))
            self.report_exposed(self._rounds.exposed)

    def _end_ddp(self) -> None:
        if self._ddp:
            self._ddp.clear()
            # This also removes its hooks on the parameters.
            gc.collect()

    def _broadcast(self, value: Any) -> Any:
        """Return rank 0's `value` on all ranks."""
        values = [value]
        dist.broadcast_object_list(values, group_src=0, group=self._ranks.group)
        return values[0]


def _check(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise InvalidArgumentError("model", f"is a {type(model).__name__}, not an nn.Module")
    reason = learning.why_not_plain(model)
    if reason is not None:
        raise InvalidArgumentError("model", reason, remedy="pass the plain module")
    if _WRAPPED in vars(model):
        raise UsageError("the model is already in a PriorityDDP", remedy="call close() on that one")
    need_processes("PriorityDDP")


def _plan_request(slice_elems: int | str, credit: int | str, order: str) -> PlanRequest:
    if order not in ("auto", *ORDERS):
        raise InvalidArgumentError(
            "order", f"'{order}' is not an order", remedy="pass one of auto, " + ", ".join(ORDERS)
        )
    for name, value, minimum in (("slice_elems", slice_elems, _MIN_SLICE), ("credit", credit, 1)):
        is_int = isinstance(value, int) and not isinstance(value, bool)
        if value != "auto" and not (is_int and int(value) >= minimum):
            raise InvalidArgumentError(
                name, f"{value!r} is not an integer of at least {minimum}", remedy="or pass 'auto'"
            )
    return PlanRequest(
        None if order == "auto" else order,
        None if slice_elems == "auto" else int(slice_elems),
        None if credit == "auto" else int(credit),
    )
