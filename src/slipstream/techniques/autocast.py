"""What autocast would do to a recorded step: an interpretation of its calls in other dtypes.

Autocast changes no code, it intercepts operators: some run in the lower precision and get their
inputs cast, some insist on float32, a few take the widest of their inputs; all others follow what
they are given. Walking the recorded calls in order with the dtype each storage *would* have gives
the calls of the step under autocast, and the casts in between. The backward pass mirrors the
forward: an operator whose inputs were cast gets the casts' copies back as saved tensors, and its
gradients are cast back.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from slipstream.graph import SCALAR_TYPE, Call, Graph, StepPhase, TensorSpec, cast
from slipstream.graph.flow import flow_of
from slipstream.graph.graph import kept
from slipstream.techniques._autocast_operators import Category, category

_FULL = "float32"
ROOT = "model"
"""What a capture calls the workload's own module; a loss module has its class's name."""

# Outputs that stay in float32 whatever the first input's dtype: statistics, and gradients of
# weights that are float32 themselves. (operator: indices of the outputs)
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
# Operators told the dtype of their result by an argument. (operator: index of the argument)
_DTYPE_ARGUMENT = {"aten::_softmax_backward_data": 3, "aten::_log_softmax_backward_data": 3}
_ENGINE = "autograd::engine::evaluate_function: "


@dataclass(frozen=True)
class Casts:
    """The casts of a plan in columns; few calls stand for many casts.

    Attributes:
        task: int64 [k], beside which task.
        before: bool [k], before it or after it.
        call: int64 [k], an index in `calls`.
        storage: int64 [k], what is copied.
        replaces: bool [k], whether the copy stands in for it from then on.
        calls: each once, in the order in which they come first.
    """

    task: NDArray[np.int64]
    before: NDArray[np.bool_]
    call: NDArray[np.int64]
    storage: NDArray[np.int64]
    replaces: NDArray[np.bool_]
    calls: tuple[Call, ...]


class Cast(NamedTuple):
    """One cast of a plan: a row of `Casts`."""

    task: int
    before: bool
    call: Call
    storage: int
    replaces: bool


@dataclass(eq=False)
class AutocastPlan:
    """The calls a step would make under autocast.

    Attributes:
        changed: by task: the call in its new dtypes.
        casts: in program order.
        lowered: how many operators run in the lower precision.
        through: by task: storages of which it reads a copy in another dtype.
    """

    changed: dict[int, Call] = field(default_factory=dict)
    casts: list[Cast] = field(default_factory=list)
    lowered: int = 0
    through: dict[int, set[int]] = field(default_factory=dict)

    @cached_property
    def table(self) -> Casts:
        """The casts, once the plan is complete."""
        # A plan has one object for all casts that are alike.
        distinct = {id(one.call): one.call for one in self.casts}
        numbers = {identity: number for number, identity in enumerate(distinct)}
        return Casts(
            np.array([one.task for one in self.casts], np.int64),
            np.array([one.before for one in self.casts], bool),
            np.array([numbers[id(one.call)] for one in self.casts], np.int64),
            np.array([one.storage for one in self.casts], np.int64),
            np.array([one.replaces for one in self.casts], bool),
            tuple(distinct.values()),
        )


@kept
def plan(graph: Graph, dtype: str, device: str = "cpu") -> AutocastPlan:
    """How `graph` would run with the root module's forward under autocast to `dtype`."""
    return _Interpreter(graph, dtype, device).run()


@dataclass
class _Node:
    """What the backward pass needs to know of a forward operator.

    Attributes:
        value: which value it returned; views of it are the same value.
        low: whether that value, and so its gradient, is in the lower precision.
        seen: by storage: the dtype in which the operator saw an input.
        cast: inputs it got as copies in the lower precision; their gradients are cast back.
    """

    value: int
    low: bool
    seen: dict[int, str] = field(default_factory=dict)
    cast: list[TensorSpec] = field(default_factory=list)


@dataclass(frozen=True)
class _Form:
    """A recorded call, as often as it is made.

    Attributes:
        dtypes: of its inputs.
        writes: whether it says that it writes its inputs.
    """

    call: Call
    name: str
    dtypes: list[str]
    writes: bool

    @classmethod
    def of(cls, call: Call) -> _Form:
        """That of `call`."""
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
        # What autograd's engine does outside of an operator.
        self._engines = [text.split("/")[-1].startswith(_ENGINE) for text in graph.strings]
        self._rules: dict[tuple[int, str], Category | None] = {}
        """By scope and operator: what autocast does there."""
        self._casts: dict[tuple[int, str], Call] = {}
        """By tensor's identity and dtype: one object for casts that are alike."""
        self._lower_specs: dict[int, TensorSpec] = {}
        self._changes: dict[tuple[int, tuple[str, ...], tuple[str, ...]], Call] = {}
        """By number of a call and its dtypes: what it becomes."""
        self._parameters = set(graph.parameters.tolist())
        self._cached: set[int] = set()
        # A storage's number is used again once it is freed, so that all that is known of one is
        # forgotten when an operator makes a new tensor there.
        self._lowered: set[int] = set()
        """Storages that would hold the lower precision though float32 was recorded."""
        self._maker: dict[int, int] = {}
        """By storage: the forward task that made it."""
        self._gradients: dict[int, int] = {}
        """By storage made in the backward pass: autograd's number of the operator it is from."""
        self._narrowed: dict[int, set[int]] = {}
        """By storage of a float32 gradient: the values for which a low copy of it exists."""
        self._nodes: dict[int, _Node] = {}
        """By autograd's number: the forward operator."""
        self._differentiable = set(self._parameters)
        """Storages that parameters have gone into."""

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
                continue  # put in by another technique: nothing is known of its tensors
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
        """The output of a model whose step ends with it becomes float32 too."""
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
            # Costs the same in every dtype; the copy it looks at is made where it is used.
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
            # Operators that autograd does not follow carry the number of the next one that it
            # does: the last one with a number is the one it belongs to.
            self._nodes[sequence] = _Node(
                value=self._maker.get(outputs[0], -1),
                low=outputs[0] in self._lowered,
                seen=dict(zip(inputs, dtypes, strict=True)),
                cast=cast_in,
            )

    def _outside(self, t: int, call: Call, inputs: list[int], outputs: list[int]) -> None:
        """Not under autocast: the model's outputs arrive as float32, each cast once."""
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
            # What autograd's engine adds up outside of an operator is the next one's gradient.
            sums_up = self._engines[self._scopes[t]] and len(inputs) > 1
            for i, (spec, storage) in enumerate(zip(call.inputs, inputs, strict=True)):
                if spec.dtype != _FULL or self._gradients.get(storage) == sequence:
                    continue
                if storage not in self._gradients:
                    dtypes[i] = node.seen.get(storage, dtypes[i])
                elif node.low and dtypes[i] == _FULL:
                    copies = self._narrowed.setdefault(storage, set())
                    if node.value not in copies and not sums_up:
                        # The gradient comes from a float32 consumer of a value in lower
                        # precision; autograd casts it on the way.
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
            # Gradients of what was cast on the way in are cast back on the way out.
            same = next((one for one in node.cast if one.numel == spec.numel), None)
            if same is None:
                continue
            node.cast.remove(same)
            if storage not in self._lowered:
                # An operator that gives float32 all the same: it must match the copy first.
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
        """From here on a float32 copy stands for what `storage` holds in the lower precision."""
        self._cast(t, self._lower(spec), _FULL, storage, before=before, replaces=True)
        self._lowered.discard(storage)

    def _forget(self, inputs: list[int], outputs: list[int]) -> None:
        """New tensors lie in `outputs`, but for those that were `inputs` already."""
        for storage in set(outputs).difference(inputs):
            self._lowered.discard(storage)
            self._maker.pop(storage, None)
            self._gradients.pop(storage, None)
            self._narrowed.pop(storage, None)
            self._differentiable.discard(storage)

    def _change(
        self, t: int, form: _Form, dtypes: list[str], inputs: list[int], outputs: list[int]
    ) -> None:
        """Note the call's new dtypes, and what its fresh outputs would hold."""
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
            # In place, the storage keeps its dtype.
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
        """Whether an operator given `dtypes` returns the lower precision."""
        if self._low not in dtypes:
            return False
        if "norm" in form.name or "scaled_dot_product" in form.name:
            # They keep statistics or weights in float32 beside.
            return dtypes[0] == self._low
        # Type promotion: tensors with dimensions outrank scalars.
        shaped = [
            dtype
            for spec, dtype in zip(form.call.inputs, dtypes, strict=True)
            if len(spec.shape) > 0
        ]
        return _FULL not in shaped
