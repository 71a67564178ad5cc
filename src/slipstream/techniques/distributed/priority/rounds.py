"""Rounds of one replica: from a backward pass through the exchange to the update of each layer.

Backward pass: a unit's gradients are written to its buffer, which is handed to the channel. Step:
settings are copied, and every unit's update becomes due. Forward pass: a due unit is awaited and
updated, together with others that have arrived. All updates run on the training thread, so that no
weight is read while it changes.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from slipstream.errors import SlipstreamWarning, UsageError
from slipstream.ranks.buckets import need_dense_gradient
from slipstream.techniques.distributed.exposed import ExposedTimes
from slipstream.techniques.distributed.optimizers import loss_of
from slipstream.techniques.distributed.priority.channel import Channel
from slipstream.techniques.distributed.priority.layout import Unit
from slipstream.techniques.distributed.priority.learning import Clock, Kind
from slipstream.techniques.distributed.priority.updates import Settings, Updates

_HOOK_ATTRIBUTES = ("_backward_hooks", "_post_accumulate_grad_hooks")


class Rounds:
    """State of one replica between steps.

    Attributes:
        units: the units that are exchanged.
        channel: the channel that exchanges them; None once detached.
        exchanging: whether gradients are exchanged, not only accumulated.
        in_parts: whether updates may wait for the next forward pass; else `step` applies them.
        clock: records when units are needed and ready, or None.
        exposed: records the time that training waits, or None.
        idle: whether some parameter had no gradient in a round.
        update_s: durations of whole updates, in seconds.
        due: whether any unit's update is due.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], ranks: int, updates: Updates) -> None:
        self.parameters, self.ranks, self.updates = list(parameters), ranks, updates
        self.units: list[Unit] = []
        self.channel: Channel | None = None
        self.exchanging, self.in_parts, self.idle = True, False, False
        self.clock: Clock | None = None
        self.exposed: ExposedTimes | None = None
        self.update_s: list[float] = []
        self.at: dict[int, tuple[Unit, int]] = {}
        self._held: list[Unit] = []
        # Whether a backward pass is running; has ended; its gradients have been shown.
        self._open = self._sent = self._shown = False
        self.due = False
        self._settings: Settings = []
        self._warned: set[str] = set()

    def lay_out(self, units: Sequence[Unit]) -> None:
        """Use other units, between rounds."""
        self.units = list(units)
        self.at = {id(p): (unit, k) for unit in units for k, p in enumerate(unit.parameters)}

    # The backward pass.

    def before_gradient(self, number: int) -> None:
        """Wait for a gradient to which autograd is about to add."""
        if self.due and self.at[id(self.parameters[number])][0].due:
            self.synchronize()
        elif self._sent and not self._open:
            self._wait()

    def after_gradient(self, number: int) -> None:
        """Write a gradient that autograd has completed to its unit's buffer.

        Raises:
            UsageError: it comes after the end of its pass, as with reentrant checkpoints.
        """
        if not self.exchanging or self.channel is None:
            return
        if not self._open:
            self._begin(self.channel)
        unit, k = self.at[id(self.parameters[number])]
        if unit.handed[k]:
            raise UsageError(
                "a gradient came after the end of its backward pass",
                remedy="call torch.utils.checkpoint with use_reentrant=False",
            )
        self._put(unit, k)
        if all(unit.handed):
            self._hand_to_channel(unit)

    def _begin(self, channel: Channel) -> None:
        if self.due:
            self.synchronize()
        if self._sent:
            # A second backward pass before the step adds to the gradients of the first.
            self._wait()
        self._open, self._shown = True, False
        self._held = []
        channel.begin()
        torch.autograd.Variable._execution_engine.queue_callback(self._end_of_backward)

    def _put(self, unit: Unit, k: int) -> None:
        """Write the parameter's gradient over the number of ranks to the unit's buffer."""
        parameter, view, guard = unit.parameters[k], unit.views[k], unit.guards[k]
        gradient = parameter.grad
        share = 1.0 / self.ranks
        if gradient is None:
            view.zero_()
        elif gradient is guard or gradient is view:
            view.mul_(share)
        else:
            need_dense_gradient(gradient)
            torch.mul(gradient, share, out=view)
        unit.flags[k] = gradient is not None
        unit.handed[k] = True
        parameter.grad = guard
        unit.has_gradient[k] = gradient is not None
        self.idle |= gradient is None

    def _hand_to_channel(self, unit: Unit) -> None:
        assert self.channel is not None
        if self.clock is not None:
            self.clock.mark(Kind.READY, unit.number)
            # No communication while computation is timed.
            self._held.append(unit)
        else:
            self.channel.hand_over(unit)

    def _end_of_backward(self) -> None:
        """Send zeros for parameters without a gradient, because other ranks may have one."""
        for unit in reversed(self.units):
            if not all(unit.handed):
                for k, done in enumerate(unit.handed):
                    if not done:
                        self._put(unit, k)
                self._hand_to_channel(unit)
        assert self.channel is not None
        for unit in self._held:
            self.channel.hand_over(unit)
        self._held = []
        self._open, self._sent = False, True

    # Waiting.

    def before_read(self) -> None:
        """Wait until gradients are the mean over all ranks, before one is read.

        Raises:
            UsageError: a backward pass is running.
        """
        if self._open:
            raise UsageError(
                "gradients are read during the backward pass",
                remedy="read them after backward()",
            )
        if self.due:
            self.synchronize()
        elif self._sent and not self._shown:
            waited = self._wait()
            self._warn(
                "gradients are read before optimizer.step(), such as by clipping or GradScaler: "
                f"every step waits there for all of them, {1e3 * waited:.1f} ms in this one, and "
                "communication does not overlap the next forward pass"
            )

    def _wait(self) -> float:
        """Wait for all gradients of the round and show them; return the seconds waited."""
        assert self.channel is not None
        awaited = [unit for unit in self.units if unit.missing]
        began = time.perf_counter()
        self.channel.wait_for(self.units)
        self._waited(began, awaited)
        for unit in self.units:
            unit.show()
        self._shown = True
        return time.perf_counter() - began

    def gate(self, units: Sequence[Unit]) -> None:
        """Apply the updates of units that the forward pass needs next."""
        if self.clock is not None:
            for unit in units:
                self.clock.mark(Kind.NEEDED, unit.number)
        while self.due and (awaited := [unit for unit in units if unit.due]):
            self._update_some(awaited)

    def synchronize(self) -> None:
        """Wait for all gradients in transit, and apply all due updates."""
        if self._sent and not self._shown:
            self._wait()
        while self.due:
            self._update_some([unit for unit in self.units if unit.due])

    def idle_now(self) -> bool:
        """Return whether this rank had no gradient of some parameter in the last round."""
        return not all(all(unit.has_gradient) for unit in self.units)

    def settle_updates(self) -> None:
        if self.due:
            self.synchronize()

    def _update_some(self, awaited: Sequence[Unit]) -> None:
        """Update due units that have arrived, or wait for the next one.

        Args:
            awaited: the units that training needs, for the record of waits.
        """
        assert self.channel is not None
        began = time.perf_counter()
        units = self.channel.wait_for_some([unit for unit in self.units if unit.due])
        self._waited(began, awaited)
        self.updates.apply(
            self._settings,
            [
                (parameter, view if used else None)
                for unit in units
                for parameter, view, used in zip(
                    unit.parameters, unit.views, unit.used(), strict=True
                )
            ],
        )
        for unit in units:
            unit.due = False
            unit.show()
        self.due = any(unit.due for unit in self.units)

    def _waited(self, began_s: float, units: Sequence[Unit]) -> None:
        if self.exposed is not None:
            parameters = [parameter for unit in units for parameter in unit.parameters]
            self.exposed.add(began_s, time.perf_counter(), parameters)

    # The step.

    def step(self, closure: Callable[[], Any] | None) -> tuple[Any, bool]:
        """Step the optimizer; return the closure's loss, and whether a round ended.

        Raises:
            UsageError: a backward pass is running or has failed.
        """
        loss = loss_of(closure)
        # Schedulers created before the wrapper would have set this.
        self.updates.optimizer._opt_called = True  # type: ignore[attr-defined]
        if self._open:
            raise UsageError(
                "optimizer.step() is called in a backward pass, or after one that failed"
            )
        self.settle_updates()
        if not self._sent:
            self.updates.whole()
            return loss, False
        if self._needs_whole_step():
            self._step_whole()
        else:
            self._settings = self.updates.settings()
            for unit in self.units:
                unit.due = True
            self.due = True
            extra = self.updates.unexchanged(self.parameters)
            self.updates.apply(self._settings, [(parameter, parameter.grad) for parameter in extra])
        self._sent = self._shown = False
        return loss, True

    def _needs_whole_step(self) -> bool:
        """Return whether this step cannot be divided into parts."""
        if not self.updates.separable:
            name = type(self.updates.optimizer).__name__
            self._warn(
                f"{name} may depend on several parameters together, or has hooks: every step waits "
                "for all gradients, and communication does not overlap the next forward pass"
            )
            return True
        replaced = any(
            parameter.grad is not guard
            for unit in self.units
            for parameter, guard in zip(unit.parameters, unit.guards, strict=True)
        )
        return self._shown or replaced or not self.in_parts

    def _step_whole(self) -> None:
        began = time.perf_counter()
        if not self._shown:
            self._wait()
        updating = time.perf_counter()
        self.updates.whole()
        now = time.perf_counter()
        self.update_s.append(now - updating)
        if self.clock is not None:
            self.clock.skip(now - began)

    def _warn(self, text: str) -> None:
        about = text.split(":")[0]
        if about not in self._warned:
            self._warned.add(about)
            warnings.warn(text, SlipstreamWarning, stacklevel=4)


class Hooks:
    """Hooks that report gradients to `rounds`, and let modules wait for units."""

    def __init__(self, rounds: Rounds) -> None:
        self._rounds = rounds
        self._gates: list[tuple[nn.Module, Sequence[Unit]]] = []
        self._on: list[Any] = []

    def attach(self) -> None:
        """Register hooks on the parameters, and on the modules that wait."""
        rounds = self._rounds
        for number, parameter in enumerate(rounds.parameters):
            tensor: Any = parameter
            self._on += [
                tensor.register_hook(lambda _, n=number: rounds.before_gradient(n)),
                tensor.register_post_accumulate_grad_hook(
                    lambda _, n=number: rounds.after_gradient(n)
                ),
            ]
        for module, units in self._gates:
            hook: Any = module.register_forward_pre_hook
            self._on.append(hook(lambda *_, units=units: rounds.gate(units)))

    def set_gates(self, gates: Sequence[tuple[nn.Module, Sequence[Unit]]]) -> None:
        """Let each module wait for its units before its forward pass."""
        self.detach()
        self._gates = list(gates)
        self.attach()

    def detach(self) -> None:
        """Remove all hooks."""
        for hook in self._on:
            hook.remove()
        self._on = []
        for parameter in self._rounds.parameters:
            for kind in _HOOK_ATTRIBUTES:
                # Even for an empty dictionary autograd acquires the interpreter lock.
                if not getattr(parameter, kind):
                    setattr(parameter, kind, None)
