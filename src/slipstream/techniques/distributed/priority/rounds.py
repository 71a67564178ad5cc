"""Rounds of one replica: from a backward pass, through the network, to the update of each layer.

Backward pass: a unit's gradients go into its buffer, and the buffer to the channel. Step: settings
are noted, every unit's update is due. Forward pass: a unit that is due is waited for and updated;
what else has arrived meanwhile is updated with it. All updates are made on the thread that trains,
so that nobody reads a weight while it changes.
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

_KINDS = ("_backward_hooks", "_post_accumulate_grad_hooks")


class Rounds:
    """The state of one replica between steps.

    Attributes:
        units: what is exchanged.
        channel: who moves it; None: nobody any more.
        exchanging: False while gradients only accumulate.
        in_parts: updates may wait for the next forward pass; False: `step` makes them.
        clock: notes when units are needed and ready, while somebody wants to know.
        exposed: is told what training waits for, while somebody wants to know.
        idle: some parameter had no gradient in a round.
        update_s: seconds of whole updates.
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
        # A backward pass goes on; it is over; its gradients are shown; updates are to be made.
        self._open = self._sent = self._shown = False
        self.due = False
        self._settings: Settings = []
        self._warned: set[str] = set()

    def lay_out(self, units: Sequence[Unit]) -> None:
        """Other units, between rounds."""
        self.units = list(units)
        self.at = {id(p): (unit, k) for unit in units for k, p in enumerate(unit.parameters)}

    # The backward pass.

    def before_gradient(self, number: int) -> None:
        """Autograd is about to add to a gradient: it must not be on its way."""
        if self.due and self.at[id(self.parameters[number])][0].due:
            self.synchronize()
        elif self._sent and not self._open:
            self._wait()

    def after_gradient(self, number: int) -> None:
        """Autograd has added all to a gradient that this backward pass has.

        Raises:
            UsageError: after the end of the pass, which reentrant checkpoints have.
        """
        if not self.exchanging or self.channel is None:
            return
        if not self._open:
            self._begin(self.channel)
        unit, k = self.at[id(self.parameters[number])]
        if unit.handed[k]:
            raise UsageError(
                "a gradient came after the end of its backward pass",
                remedy="torch.utils.checkpoint with use_reentrant=False",
            )
        self._put(unit, k)
        if all(unit.handed):
            self._hand_over(unit)

    def _begin(self, channel: Channel) -> None:
        if self.due:
            self.synchronize()
        if self._sent:
            # A second backward pass before the step adds to what the first one has brought.
            self._wait()
        self._open, self._shown = True, False
        self._held = []
        channel.begin()
        torch.autograd.Variable._execution_engine.queue_callback(self._end_of_backward)

    def _put(self, unit: Unit, k: int) -> None:
        """The parameter's gradient into the unit's buffer, as this rank's share of the mean."""
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
        unit.given[k] = gradient is not None
        self.idle |= gradient is None

    def _hand_over(self, unit: Unit) -> None:
        assert self.channel is not None
        if self.clock is not None:
            self.clock.mark(Kind.READY, unit.number)
            # Nothing is on its way while computation is timed.
            self._held.append(unit)
        else:
            self.channel.hand_over(unit)

    def _end_of_backward(self) -> None:
        """What has no gradient is sent as zeros: the others may have one."""
        for unit in reversed(self.units):
            if not all(unit.handed):
                for k, done in enumerate(unit.handed):
                    if not done:
                        self._put(unit, k)
                self._hand_over(unit)
        assert self.channel is not None
        for unit in self._held:
            self.channel.hand_over(unit)
        self._held = []
        self._open, self._sent = False, True

    # Waiting.

    def before_read(self) -> None:
        """Somebody reads a gradient: let it be the mean over all ranks.

        Raises:
            UsageError: in a backward pass.
        """
        if self._open:
            raise UsageError(
                "gradients are read while the backward pass goes on",
                remedy="read them after backward()",
            )
        if self.due:
            self.synchronize()
        elif self._sent and not self._shown:
            waited = self._wait()
            self._warn(
                "gradients are read before optimizer.step(), as clipping by norm and GradScaler "
                f"do: every step waits there for all of them, {1e3 * waited:.1f} ms in this one, "
                "and nothing hides behind the next forward pass"
            )

    def _wait(self) -> float:
        """Wait for all gradients of the round and show them; the seconds it took."""
        assert self.channel is not None
        awaited = [unit for unit in self.units if unit.left]
        began = time.perf_counter()
        self.channel.wait_for(self.units)
        self._waited(began, awaited)
        for unit in self.units:
            unit.show()
        self._shown = True
        return time.perf_counter() - began

    def gate(self, units: Sequence[Unit]) -> None:
        """The forward pass comes to where units are needed: make their updates."""
        if self.clock is not None:
            for unit in units:
                self.clock.mark(Kind.NEEDED, unit.number)
        while self.due and (awaited := [unit for unit in units if unit.due]):
            self._update_some(awaited)

    def synchronize(self) -> None:
        """Wait for all that is on its way; make all updates that are due."""
        if self._sent and not self._shown:
            self._wait()
        while self.due:
            self._update_some([unit for unit in self.units if unit.due])

    def idle_now(self) -> bool:
        """Whether this rank had no gradient of some parameter in the last round."""
        return not all(all(unit.given) for unit in self.units)

    def settle_updates(self) -> None:
        if self.due:
            self.synchronize()

    def _update_some(self, awaited: Sequence[Unit]) -> None:
        """Update what has arrived; where nothing has, wait for what arrives next.

        Args:
            awaited: for whose sake training waits.
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
            parameters = [one for unit in units for one in unit.parameters]
            self.exposed.add(began_s, time.perf_counter(), parameters)

    # The step.

    def step(self, closure: Callable[[], Any] | None) -> tuple[Any, bool]:
        """What the closure returns; and whether there was a round to end.

        Raises:
            UsageError: in a backward pass, or after one that failed.
        """
        loss = loss_of(closure)
        # What a scheduler that was made before us would have noted.
        self.updates.optimizer._opt_called = True  # type: ignore[attr-defined]
        if self._open:
            raise UsageError("optimizer.step() in a backward pass, or after one that failed")
        self.settle_updates()
        if not self._sent:
            self.updates.whole()
            return loss, False
        if self._at_once():
            self._step_at_once()
        else:
            self._settings = self.updates.settings()
            for unit in self.units:
                unit.due = True
            self.due = True
            strangers = self.updates.strangers(self.parameters)
            self.updates.apply(self._settings, [(one, one.grad) for one in strangers])
        self._sent = self._shown = False
        return loss, True

    def _at_once(self) -> bool:
        """Whether this step cannot be made in parts."""
        if not self.updates.separable:
            name = type(self.updates.optimizer).__name__
            self._warn(
                f"{name} may look at several parameters together, or has hooks: every step waits "
                "for all gradients, and nothing hides behind the next forward pass"
            )
            return True
        replaced = any(
            parameter.grad is not guard
            for unit in self.units
            for parameter, guard in zip(unit.parameters, unit.guards, strict=True)
        )
        return self._shown or replaced or not self.in_parts

    def _step_at_once(self) -> None:
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
    """What tells `rounds` of gradients, and lets modules wait for units.

    Put on, taken off without a trace, and put on again.
    """

    def __init__(self, rounds: Rounds) -> None:
        self._rounds = rounds
        self._gates: list[tuple[nn.Module, Sequence[Unit]]] = []
        self._on: list[Any] = []

    def put_on(self) -> None:
        """On the parameters, and on the modules that wait."""
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

    def wait_at(self, gates: Sequence[tuple[nn.Module, Sequence[Unit]]]) -> None:
        """Let each module wait for these units from now on, before its forward pass."""
        self.take_off()
        self._gates = list(gates)
        self.put_on()

    def take_off(self) -> None:
        """Gradients are nobody's business any more, and nobody waits."""
        for one in self._on:
            one.remove()
        self._on = []
        for parameter in self._rounds.parameters:
            for kind in _KINDS:
                # Autograd takes the interpreter's lock for an empty dictionary as for a full one.
                if not getattr(parameter, kind):
                    setattr(parameter, kind, None)
