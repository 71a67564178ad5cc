"""Interpretation of a recorded step under autocast.

Autocast intercepts operators: some run in the lower precision with cast inputs, some require
float32, a few use the widest dtype of their inputs; all others use their input dtypes. Interpreting
the recorded calls in order, with the dtype that each storage *would* have, yields the calls of the
step under autocast and the casts. The backward pass mirrors the forward: an operator whose inputs
were cast reads the copies as saved tensors, and its gradients are cast back.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from slipstream.graph import SCALAR_TYPE, Call, Graph, StepPhase, TensorSpec, cast
from slipstream.graph.flow import flow_of
from slipstream.graph.graph import cached_per_graph
from slipstream.techniques._autocast_operators import Category, category

_FULL = "float32"
ROOT = "model"
"""Name of the workload's module in a recording; a loss module has the name of its class."""

# Outputs that are float32 for any input dtype: statistics, and gradients of float32 weights, as
# indices of outputs by operator.
_FULL_OUTPUTS = {
    "aten::_scaled_dot_product_flash_attention_for_cpu": (1,),
    "aten::native_layer_norm": (1, 2),
    "aten::native_group_norm": (1, 2),
    "aten::native_batch_norm": (1, 2),
    "aten::_native_batch_norm_legit": (1, 2),
    "aten::native_layer_norm_backward": (1, 2),
    "aten::native_group_norm_backward": (1, 2),
    "aten::native_batch_norm_backward": (1, 2),
    "aten::mkldnn_rnn_layer_backward": (0, 1, 2, 3, 4, 5, 6),
}
# Operators with an argument for the dtype of the result: its index by operator.
_DTYPE_ARGUMENT = {"aten::_softmax_backward_data": 3, "aten::_log_softmax_backward_data": 3}
_ENGINE = "autograd::engine::evaluate_function: "


@dataclass(frozen=True)
class Casts:
    """Casts of a plan in columns; many casts share a call.

    Attributes:
        task: int64 [k], the task next to it.
        before: bool [k], whether it runs before that task, not after it.
        call: int64 [k], index into `calls`.
        storage: int64 [k], storage that is copied.
        replaces: bool [k], whether the copy replaces the storage from then on.
        calls: distinct calls in order of first use.
    """

    task: NDArray[np.int64]
    before: NDArray[np.bool_]
    call: NDArray[np.int64]
    storage: NDArray[np.int64]
    replaces: NDArray[np.bool_]
    calls: tuple[Call, ...]


class Cast(NamedTuple):
    """A cast of a plan: a row of `Casts`."""

    task: int
    before: bool
    call: Call
    storage: int
    replaces: bool


@dataclass(eq=False)
class AutocastPlan:
    """Calls of a step under autocast.

    Attributes:
        changed: call in its new dtypes, by task.
        casts: casts in program order.
        lowered: number of operators in the lower precision.
        through: storages of which a task reads a copy in another dtype, by task.
    """

    changed: dict[int, Call] = field(default_factory=dict)
    casts: list[Cast] = field(default_factory=list)
    lowered: int = 0
    through: dict[int, set[int]] = field(default_factory=dict)

    @cached_property
    def table(self) -> Casts:
        """Columns of the casts of a complete plan."""
        # Equal casts of a plan share one object.
        distinct = {id(row.call): row.call for row in self.casts}
        numbers = {identity: number for number, identity in enumerate(distinct)}
        return Casts(
            np.array([row.task for row in self.casts], np.int64),
            np.array([row.before for row in self.casts], bool),
            np.array([numbers[id(row.call)] for row in self.casts], np.int64),
            np.array([row.storage for row in self.casts], np.int64),
            np.array([row.replaces for row in self.casts], bool),
            tuple(distinct.values()),
        )


@cached_per_graph
def plan(graph: Graph, dtype: str, device: str = "cpu") -> AutocastPlan:
    """Return the plan of `graph` with the root module's forward under autocast to `dtype`."""
    return _Interpreter(graph, dtype, device).run()


@dataclass
class _Node:
    """A forward operator, as the backward pass needs it.

    Attributes:
        value: identity of its result; views of it have the same.
        low: whether the result, and so its gradient, is in the lower precision.
        seen: dtype in which the operator read an input, by storage.
        cast: inputs that it read as copies in the lower precision; their gradients are cast back.
    """

    value: int
    low: bool
    seen: dict[int, str] = field(default_factory=dict)
    cast: list[TensorSpec] = field(default_factory=list)


@dataclass(frozen=True)
class _Form:
    """A recorded call, shared by all tasks that make it.

    Attributes:
        dtypes: dtypes of its inputs.
        writes: whether its schema declares that it writes inputs.
    """

    call: Call
    name: str
    dtypes: list[str]
    writes: bool

    @classmethod
    def of(cls, call: Call) -> _Form:
        """Return the form of `call`."""
        return cls(call, call.name, [spec.dtype for spec in call.inputs], "!" in call.op)


class _Interpreter:
    def __init__(self, graph: Graph, dtype: str, device: str) -> None:
        self._graph = graph
        self._low = dtype
        self._device = device
        self._plan = AutocastPlan()
        self._calls = graph.tasks.call.tolist()
        self._sequences = graph.tasks.sequence.tolist()
        self._scopes = graph.tasks.scope.tolist()
        self._views: list[bool] = flow_of(graph).views.tolist()
        in_model = np.array([text.partition(".")[0] == ROOT for text in graph.strings])
        self._inside = in_model[graph.tasks.module]
        # Work of autograd's engine outside of operators.
        self._engines = [text.split("/")[-1].startswith(_ENGINE) for text in graph.strings]
        self._rules: dict[tuple[int, str], Category | None] = {}
        """Category by scope and operator."""
        self._casts: dict[tuple[int, str], Call] = {}
        """Casts by tensor's identity and dtype; equal casts share one object."""
        self._lower_specs: dict[int, TensorSpec] = {}
        self._changes: dict[tuple[int, tuple[str, ...], tuple[str, ...]], Call] = {}
        """Changed calls by number of the call and dtypes."""
        self._parameters = set(graph.parameters.tolist())
        self._cached: set[int] = set()
        # Storage numbers are reused once freed, so the state of a storage is reset when an operator
        # creates a new tensor in it.
        self._lowered: set[int] = set()
        """Storages in the lower precision that were recorded in float32."""
        self._maker: dict[int, int] = {}
        """Forward task that created a storage."""
        self._gradients: dict[int, int] = {}
        """Autograd's number of the operator whose backward created a storage."""
        self._narrowed: dict[int, set[int]] = {}
        """Values for which a low copy of a float32 gradient exists, by its storage."""
        self._nodes: dict[int, _Node] = {}
        """Forward operators by autograd's number."""
        self._differentiable = set(self._parameters)
        """Storages that depend on parameters."""

    def run(self) -> AutocastPlan:
        graph = self._graph
        starts, operands = graph.operand_start.tolist(), graph.operands.tolist()
        forms = [_Form.of(call) for call in graph.calls]
        forward, backward = int(StepPhase.FORWARD), int(StepPhase.BACKWARD)
        inside = (self._inside & (graph.tasks.phase == forward)).tolist()
        for t, (number, phase) in enumerate(
            zip(self._calls, graph.tasks.phase.tolist(), strict=True)
        ):
            if number < 0:
                continue
            form = forms[number]
            call = form.call
            middle = starts[t] + len(form.dtypes)
            if starts[t + 1] != middle + len(call.outputs):
                continue  # inserted by another technique, with unknown tensors
            inputs, outputs = operands[starts[t] : middle], operands[middle : starts[t + 1]]
            if phase == backward:
                self._backward(t, form, inputs, outputs)
            elif inside[t]:
                self._forward(t, form, inputs, outputs)
            else:
                self._outside(t, call, inputs, outputs)
        self._return_output()
        return self._plan

    def _return_output(self) -> None:
        """Cast the model's output to float32 if the step ends with it."""
        forward = np.flatnonzero(self._inside).tolist()
        call = self._graph.tasks.call[forward[-1]] if forward else -1
        if call < 0 or (self._graph.tasks.phase == StepPhase.BACKWARD).any():
            return
        outputs = self._graph.calls[call].outputs
        storages = self._graph.storages(forward[-1])[-len(outputs) :] if outputs else ()
        for spec, storage in zip(outputs, storages, strict=True):
            if int(storage) in self._lowered and spec.dtype == _FULL:
                self._replace(forward[-1], spec, int(storage), before=False)

    def _rule(self, t: int, name: str) -> Category | None:
        key = (self._scopes[t], name)
        if key not in self._rules:
            scope = self._graph.string(self._scopes[t]).split("/")
            self._rules[key] = category([*scope, name], self._device)
        return self._rules[key]

    def _forward(self, t: int, form: _Form, inputs: list[int], outputs: list[int]) -> None:
        call, rule = form.call, self._rule(t, form.name)
        dtypes = self._dtypes(form, inputs)
        cast_in: list[TensorSpec] = []
        view = self._views[t]
        if view:
            # The cost does not depend on the dtype; the copy is made by the operator that uses it.
            rule = None
        elif rule == "lower":
            for spec, storage, dtype in zip(call.inputs, inputs, dtypes, strict=True):
                if dtype != _FULL or storage in self._cached:
                    continue
                self._cast(t, spec, self._low, storage, before=True)
                if storage in self._differentiable:
                    cast_in.append(spec)
                if storage in self._parameters:
                    self._cached.add(storage)
            dtypes = [self._low if dtype == _FULL else dtype for dtype in dtypes]
            self._plan.lowered += 1
        elif rule == "float32" or (rule == "widest" and _FULL in dtypes):
            for spec, storage, dtype in zip(call.inputs, inputs, dtypes, strict=True):
                if dtype == self._low and spec.dtype == _FULL:
                    self._cast(t, self._lower(spec), _FULL, storage, before=True)
            dtypes = [_FULL if dtype == self._low else dtype for dtype in dtypes]
        differentiable = not self._differentiable.isdisjoint(inputs)
        self._forget(inputs, outputs)
        if not view:
            self._change(t, form, dtypes, inputs, outputs)
        for storage in set(outputs).difference(inputs):
            self._maker[storage] = t
            if differentiable:
                self._differentiable.add(storage)
        sequence = self._sequences[t]
        if sequence >= 0 and outputs:
            # Operators that autograd does not track have the number of the next one that it tracks,
            # so a number belongs to the last operator that has it.
            self._nodes[sequence] = _Node(
                value=self._maker.get(outputs[0], -1),
                low=outputs[0] in self._lowered,
                seen=dict(zip(inputs, dtypes, strict=True)),
                cast=cast_in,
            )

    def _outside(self, t: int, call: Call, inputs: list[int], outputs: list[int]) -> None:
        """Handle a task outside of autocast, which reads the model's outputs cast to float32."""
        for spec, storage in zip(call.inputs, inputs, strict=True):
            if storage in self._lowered and spec.dtype == _FULL:
                self._replace(t, spec, storage, before=True)
        self._forget(inputs, outputs)

    def _backward(self, t: int, form: _Form, inputs: list[int], outputs: list[int]) -> None:
        call, sequence = form.call, self._sequences[t]
        node = self._nodes.get(sequence)
        dtypes = self._dtypes(form, inputs)
        if node is not None:
            dtypes = list(dtypes)
            # A sum by autograd's engine outside of operators is the gradient of the next one.
            sums_up = self._engines[self._scopes[t]] and len(inputs) > 1
            for i, (spec, storage) in enumerate(zip(call.inputs, inputs, strict=True)):
                if spec.dtype != _FULL or self._gradients.get(storage) == sequence:
                    continue
                if storage not in self._gradients:
                    dtypes[i] = node.seen.get(storage, dtypes[i])
                elif node.low and dtypes[i] == _FULL:
                    copies = self._narrowed.setdefault(storage, set())
                    if node.value not in copies and not sums_up:
                        # A float32 operator that read a value in the lower precision produced the
                        # gradient; autograd casts it.
                        self._cast(t, spec, self._low, storage, before=True)
                        copies.add(node.value)
                    if node.value in copies:
                        dtypes[i] = self._low
        if self._views[t]:
            return
        self._forget(inputs, outputs)
        self._change(t, form, dtypes, inputs, outputs)
        lower = self._low in dtypes
        for spec, storage in zip(call.outputs, outputs, strict=True):
            if storage in inputs:
                continue
            self._gradients[storage] = sequence
            if node is None or not node.cast or spec.dtype != _FULL or not lower:
                continue
            # Gradients of cast inputs are cast back.
            same = next((source for source in node.cast if source.numel == spec.numel), None)
            if same is None:
                continue
            node.cast.remove(same)
            if storage not in self._lowered:
                # A gradient that is float32 regardless is first cast to the copy's dtype.
                self._cast(t, spec, self._low, storage, before=False)
            self._replace(t, spec, storage, before=False)

    def _dtypes(self, form: _Form, inputs: list[int]) -> list[str]:
        if self._lowered.isdisjoint(inputs):
            return form.dtypes
        return [
            self._low if storage in self._lowered and dtype == _FULL else dtype
            for dtype, storage in zip(form.dtypes, inputs, strict=True)
        ]

    def _cast(
        self, t: int, spec: TensorSpec, dtype: str, storage: int, *, before: bool,
        replaces: bool = False,
    ) -> None:  # fmt: skip
        key = (id(spec), dtype)
        if key not in self._casts:
            self._casts[key] = cast(spec, dtype)
        self._plan.casts.append(Cast(t, before, self._casts[key], storage, replaces))

    def _lower(self, spec: TensorSpec) -> TensorSpec:
        if id(spec) not in self._lower_specs:
            self._lower_specs[id(spec)] = spec.as_dtype(self._low)
        return self._lower_specs[id(spec)]

    def _replace(self, t: int, spec: TensorSpec, storage: int, *, before: bool) -> None:
        """Replace the lower-precision content of `storage` by a float32 copy from here."""
        self._cast(t, self._lower(spec), _FULL, storage, before=before, replaces=True)
        self._lowered.discard(storage)

    def _forget(self, inputs: list[int], outputs: list[int]) -> None:
        """Reset the state of storages in `outputs` that are not in `inputs`."""
        for storage in set(outputs).difference(inputs):
            self._lowered.discard(storage)
            self._maker.pop(storage, None)
            self._gradients.pop(storage, None)
            self._narrowed.pop(storage, None)
            self._differentiable.discard(storage)

    def _change(
        self, t: int, form: _Form, dtypes: list[str], inputs: list[int], outputs: list[int]
    ) -> None:
        """Record the call's new dtypes, and those of its new outputs."""
        held, call = self._dtypes(form, inputs), form.call
        if dtypes == held == form.dtypes:
            return
        copied = {s for s, is_, has in zip(inputs, dtypes, held, strict=True) if is_ != has}
        if copied:
            self._plan.through[t] = copied
        low = self._follows(form, dtypes)
        full = _FULL_OUTPUTS.get(form.name, ())
        results = [
            self._low if low and spec.dtype == _FULL and i not in full else spec.dtype
            for i, spec in enumerate(call.outputs)
        ]
        for storage, result in zip(outputs, results, strict=True):
            # An in-place operator does not change the dtype of its storage.
            if storage not in inputs and result == self._low:
                self._lowered.add(storage)
        if dtypes != form.dtypes:
            key = (self._calls[t], tuple(dtypes), tuple(results))
            if key not in self._changes:
                self._changes[key] = self._in_dtypes(call, dtypes, results, low=low)
            self._plan.changed[t] = self._changes[key]

    def _in_dtypes(self, call: Call, dtypes: list[str], results: list[str], *, low: bool) -> Call:
        changed = call.with_dtypes(dtypes, results)
        place = _DTYPE_ARGUMENT.get(call.name)
        if place is None or not low:
            return changed
        arguments = list(changed.arguments)
        arguments[place] = SCALAR_TYPE[self._low]
        return replace(changed, arguments=tuple(arguments))

    def _follows(self, form: _Form, dtypes: list[str]) -> bool:
        """Whether an operator with inputs of `dtypes` returns the lower precision."""
        if self._low not in dtypes:
            return False
        if "norm" in form.name or "scaled_dot_product" in form.name:
            # Statistics and weights are float32 regardless.
            return dtypes[0] == self._low
        # Type promotion: tensors with dimensions have priority over scalars.
        shaped = [
            dtype
            for spec, dtype in zip(form.call.inputs, dtypes, strict=True)
            if len(spec.shape) > 0
        ]
        return _FULL not in shaped
