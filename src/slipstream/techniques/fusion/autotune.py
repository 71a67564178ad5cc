"""Choose the kernels with which a step is faster, by running the step.

The first call runs every kernel on the inputs of the operators it replaces. A kernel with other
results is never used.

A kernel that is faster alone may make the step slower, since it changes the state of the caches for
the operators around it. So a traced graph runs in its own order on the inputs of its first call,
forward and backward, and each region's kernel and operators are timed within it. Then the graph
with the faster kernels, the graph as the user wrote it, and inductor's compilation of it are timed
alternately, and every later call runs the fastest.
"""

from __future__ import annotations

import contextlib
import copy
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule, Interpreter, Node
from torch.utils._python_dispatch import _disable_current_modes

from slipstream.codegen import CompileError
from slipstream.codegen.rows import Nest
from slipstream.codegen.rows_kernels import RowKernel
from slipstream.measure import CallableArm, ExperimentSettings, run
from slipstream.measure.claims import ratio_between
from slipstream.measure.environment import from_facts
from slipstream.measure.runner import RunPlan as MeasurePlan
from slipstream.surgery.fx import replace_regions, simplify
from slipstream.techniques.fusion.plan import FusionPlan

try:
    from torch.fx.graph import _BoxedCodeGen
except ImportError:  # an older torch
    _BoxedCodeGen = None  # type: ignore[assignment, misc]

MAX_TIME_RATIO = 0.98
"""Maximum time of a kernel relative to the operators that it replaces."""
WRITTEN, FUSED, INDUCTOR = "the model as written", "the generated kernels", "inductor"
_BLOCKS, _BUDGET_S = 7, 15.0
# Candidates differ by a few percent; 7 pairs on a busy machine only resolve 6 %.
_FINAL_BLOCKS = 41
_OPERATORS, _KERNELS = "operators", "kernels"
# Maximum relative difference between the results of a kernel and of its operators, by the least
# precise dtype of the region: sums have another order, and torch rounds between operators.
_TOLERANCE = {"float16": 0.02, "bfloat16": 0.05, "float32": 1e-3, "float64": 1e-8}
_Work = Callable[..., Any]
Make = Callable[[Sequence[Nest]], list[RowKernel]]


class TracedPass:
    """A traced forward or backward pass, as operators and with a kernel per region.

    Args:
        make: makes the kernels of nests.

    Attributes:
        run: the function that a call of the pass runs.
        fused: the pass with all kernels, or with those that `keep` retained.
        planned: its regions.
        comparison: the interpreter that calls run after `compare`.
    """

    comparison: Comparison

    def __init__(self, module: GraphModule, planned: FusionPlan, make: Make) -> None:
        self._module, self.planned = module, planned
        self._kernels = make([region.nest for region in planned.regions])
        self.fused = replace_regions(module, planned.traced, planned.replacements(self._kernels))
        self.run: _Work = boxed(self.fused)
        self._watched: dict[str, _Watched] = {}

    @property
    def regions(self) -> int:
        """Number of regions."""
        return len(self.planned.regions)

    def compare(self) -> None:
        """Make calls run the operators, and compare the kernels with them."""
        self.comparison = Comparison(self._module, self.planned, self._kernels)
        self.run = self.comparison.boxed_run

    def watch(self, name: str, clock: Callable[[], int]) -> None:
        """Make calls run the operators or the kernels, and time every region."""
        if name not in self._watched:
            graph, members = self.planned.traced.nodes, self.planned.members
            of = {graph[n]: number for number, group in enumerate(members) for n in group}
            module = self._module
            if name == _KERNELS:
                module = self.fused
                of = {
                    node: int(str(node.target).rpartition("_")[2])
                    for node in module.graph.nodes if node.op == "call_module"
                }  # fmt: skip
            self._watched[name] = _Watched(module, of, clock)
        self.run = self._watched[name].boxed_run

    def faster(self) -> list[bool]:
        """Return per region whether its kernel is faster within the step than its operators."""
        operators, kernels = (
            [median(watched.elapsed_ns.get(n, [0])[-_BLOCKS:]) for n in range(self.regions)]
            for watched in (self._watched[_OPERATORS], self._watched[_KERNELS])
        )
        return [k <= MAX_TIME_RATIO * o for o, k in zip(operators, kernels, strict=True)]

    def keep(self, chosen: Sequence[bool]) -> None:
        """Run only the kernels of the `chosen` regions in later calls."""
        pairs = zip(self._kernels, chosen, strict=True)
        kernels = [kernel for kernel, is_chosen in pairs if is_chosen]
        self._watched.clear()
        self.planned, self._kernels = self.planned.only(chosen), kernels
        replacements = self.planned.replacements(kernels)
        self.fused = replace_regions(self._module, self.planned.traced, replacements)
        self.run = boxed(self.fused if kernels else self._module)


def boxed(module: GraphModule) -> _Work:
    """Return a function that runs a traced graph on a list of arguments, which it clears.

    As in eager mode, the memory of a tensor is freed after its last use. Otherwise the inputs of a
    backward pass would stay alive until its end.
    """
    module = simplify(module)
    if _BoxedCodeGen is None:
        unpacked = module.forward
        return lambda arguments: unpacked(*arguments)
    module.graph.set_codegen(_BoxedCodeGen())
    module.recompile()
    return module.forward


class _Watched(Interpreter):
    """Interpreter that times the nodes of each region.

    Attributes:
        elapsed_ns: per region, the time of its nodes in each run.
    """

    def __init__(
        self, module: GraphModule, region_of: Mapping[Node, int], clock: Callable[[], int]
    ) -> None:
        super().__init__(module)
        self.elapsed_ns: dict[int, list[int]] = {}
        self._region_of, self._clock = region_of, clock
        self._current = -1

    def run(self, *arguments: Any, **options: Any) -> Any:
        for region in set(self._region_of.values()):
            self.elapsed_ns.setdefault(region, []).append(0)
        return super().run(*arguments, **options)

    def run_node(self, n: Node) -> Any:
        self._current = self._region_of.get(n, -1)
        return super().run_node(n)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        return self._timed(super().call_function, target, args, kwargs)

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        return self._timed(super().call_module, target, args, kwargs)

    def _timed(self, call: _Work, *arguments: Any) -> Any:
        if self._current < 0:
            return call(*arguments)
        start = self._clock()
        result = call(*arguments)
        self.elapsed_ns[self._current][-1] += self._clock() - start
        return result


class Comparison(Interpreter):
    """Interpreter that runs the operators, and each region's kernel on the same inputs.

    Attributes:
        differences: per region, the relative difference between its kernel and its operators.
        wrong: per region, why its kernel cannot replace its operators.
    """

    def __init__(
        self, module: GraphModule, planned: FusionPlan, kernels: Sequence[RowKernel]
    ) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.differences: dict[int, float] = {}
        self.wrong: dict[int, str] = {}
        self._planned, self._kernels = planned, kernels
        place = {node: n for n, node in enumerate(module.graph.nodes)}
        nodes = planned.traced.nodes
        self._ends: dict[Node, list[int]] = {}
        for number, members in enumerate(planned.members):
            last = max((nodes[n] for n in members), key=place.__getitem__)
            self._ends.setdefault(last, []).append(number)

    def run_node(self, n: Node) -> Any:
        self.env[n] = super().run_node(n)
        for number in self._ends.get(n, ()):
            try:
                self.differences[number] = self._difference(number)
            except CompileError as error:
                self.wrong[number] = error.what
                continue
            nest = self._planned.regions[number].nest
            tensors = (*nest.inputs, *nest.outputs)
            tolerance = max(_TOLERANCE.get(spec.dtype, 0.0) for spec in tensors)
            if self.differences[number] > tolerance:
                self.wrong[number] = "a kernel's results differ from those of its operators"
        return self.env[n]

    def _difference(self, number: int) -> float:
        region, traced = self._planned.regions[number], self._planned.traced
        values: dict[int, Tensor] = {}
        for n in self._planned.members[number]:
            value = self.env[traced.nodes[n]]
            results = value if isinstance(value, (list, tuple)) else (value,)
            tensors = [result for result in results if isinstance(result, Tensor)]
            values |= dict(zip(traced.outputs[n], tensors, strict=True))
        inputs = [self.env[node] for node in region.reads]
        nest = region.nest
        sums = {store.output for store in nest.stores if store.column}
        norms = [_norm(x) for x in inputs
                 if x.is_floating_point() and x.numel() == nest.rows * nest.columns]  # fmt: skip
        # Terms that cancel in a sum over rows leave less than their rounding errors.
        floor = min(norms, default=0.0)
        pairs = zip(region.makes, self._kernels[number](*inputs), strict=True)
        return max(
            _relative_difference(ours, values[value], floor if output in sums else 0.0)
            for output, (value, ours) in enumerate(pairs)
        )


def _norm(x: Tensor) -> float:
    """Return the norm of the finite elements of `x`."""
    return float(x.double().nan_to_num(0.0, 0.0, 0.0).norm())


def _relative_difference(ours: Tensor, theirs: Tensor, floor: float) -> float:
    """Return the norm of the difference relative to that of `theirs`, or to `floor` if larger.

    Infinite if an element is infinite or NaN in only one of the two.
    """
    a, b = ours.double(), theirs.double()
    same = (a == b) | (a.isnan() & b.isnan())
    difference = torch.where(same, 0.0, a - b)
    if not bool(difference.isfinite().all()):
        return math.inf
    size = max(_norm(theirs), floor)
    return float(difference.norm()) / size if size else float("inf" if difference.any() else 0.0)


def inductor(module: GraphModule, inputs: Sequence[Any]) -> _Work:
    """Compile `module` with inductor, as ``torch.compile`` does by default.

    Its backward pass is compiled when it first runs.

    Args:
        inputs: tensors to compile for; fake ones while torch.compile is tracing.
    """
    from torch._inductor.compile_fx import compile_fx

    twin = GraphModule(module, copy.deepcopy(module.graph))
    return cast(_Work, compile_fx(twin, list(inputs)))


def failure(error: Exception) -> str:
    """Return the reason why inductor is not a candidate."""
    line = str(error).strip().partition("\n")[0]
    return f"inductor fails: {type(error).__name__}: {line}"


class Autotuned:
    """A traced graph whose first call chooses the candidate that later calls run.

    Args:
        plain: the graph as the user wrote it.
        traced: the same through `passes`, which `compare` until the first call.
        reasons: why candidates are not used; the first call appends more.
        waiting: number of calls that run as written before the choice.
        compiled: compiles the graph with inductor for the inputs of a call; None to omit it.

    Attributes:
        choice: `WRITTEN`, `FUSED` or `INDUCTOR`; None before the first call.
        gains: speed of each timed candidate relative to the graph as written.
    """

    choice: str | None = None

    def __init__(
        self, plain: _Work, traced: _Work, passes: Sequence[TracedPass], reasons: list[str],
        waiting: int = 0, compiled: Callable[[Sequence[Any]], _Work] | None = None,
    ) -> None:  # fmt: skip
        self.gains: dict[str, float] = {}
        self.reasons = reasons
        self._waiting = waiting
        self._plain, self._traced, self._passes = plain, traced, passes
        self._compiled = compiled
        self._run: _Work | None = None

    def __call__(self, *arguments: Any) -> Any:
        if self._run is None:
            # A model in DistributedDataParallel is compiled by buckets, each of which is called on
            # fake tensors first, for the shapes of the next. AOTAutograd answers that call.
            if any(isinstance(tensor, FakeTensor) for tensor in arguments):
                return self._traced(*arguments)
            if self._waiting:
                self._waiting -= 1
                return self._plain(*arguments)
            self.choice, self._run = self._choose(arguments)
        return self._run(*arguments)

    def _choose(self, inputs: Sequence[Any]) -> tuple[str, _Work]:
        device = next((x.device for x in inputs if isinstance(x, Tensor) and x.is_cuda), None)
        own_thread = device is None and torch.get_num_threads() == 1
        candidates = {WRITTEN: self._plain}
        with _isolated(device):
            try:
                if self._fuse(inputs, _clock(device, own_thread), own_thread):
                    candidates[FUSED] = self._traced
                else:
                    self.reasons.append("no region of its operators is faster as a kernel")
            except Exception as error:  # of kernels; errors of the user recur in the plain graph
                self.reasons.append(f"its kernels fail: {error}")
            try:
                if self._compiled is not None:
                    compiled = self._compiled(inputs)
                    _step(compiled, inputs)  # compiles the backward pass
                    candidates[INDUCTOR] = compiled
            except Exception as error:  # of inductor, such as a missing compiler
                self.reasons.append(failure(error))
            steps = {name: partial(_step, call, inputs) for name, call in candidates.items()}
            try:
                if len(steps) > 1:
                    self.gains = _time_ratios(steps, own_thread, _FINAL_BLOCKS)
            except Exception as error:  # the model as written remains
                self.reasons.append(f"the candidates cannot be timed: {error}")
        best = max(self.gains, key=self.gains.__getitem__, default=WRITTEN)
        if best != WRITTEN and self.gains[best] * MAX_TIME_RATIO < 1.0:
            best = WRITTEN
        for name, gain in self.gains.items():
            if name not in (WRITTEN, best):
                subject = "its kernels make" if name == FUSED else "inductor makes"
                self.reasons.append(f"{subject} the pass {gain:.2f} times as fast: too little")
        return best, candidates[best]

    def _fuse(self, inputs: Sequence[Any], clock: Callable[[], int], own_thread: bool) -> bool:
        """Retain the kernels that are faster within the step; return whether any are."""
        if not self._passes:
            return False

        def watched(name: str) -> Callable[[], None]:
            def step() -> None:
                for traced in self._passes:
                    traced.watch(name, clock)
                _step(self._traced, inputs)

            return step

        # Compare kernels with their operators; a backward pass may be traced only now.
        _step(self._traced, inputs)
        for traced in self._passes:
            self.reasons += sorted(set(traced.comparison.wrong.values()))
            traced.keep([n not in traced.comparison.wrong for n in range(traced.regions)])
        _time_ratios({name: watched(name) for name in (_OPERATORS, _KERNELS)}, own_thread)
        for traced in self._passes:
            traced.keep(traced.faster())
        return any(traced.regions for traced in self._passes)


def _step(call: _Work, arguments: Sequence[Any]) -> None:
    """Run forward and, if gradients are recorded, backward, without effects on `arguments`.

    Tensors that may be written in place are copied; those that require gradients share memory, but
    not hooks.
    """
    twins = [
        x if not isinstance(x, Tensor)
        else x.detach().requires_grad_() if x.requires_grad else x.detach().clone()
        for x in arguments
    ]  # fmt: skip
    outputs = call(*twins)
    ends = [x for x in outputs if isinstance(x, Tensor) and x.requires_grad]
    sources = [x for x in twins if isinstance(x, Tensor) and x.requires_grad]
    if ends and sources:
        with torch.autocast(ends[0].device.type, enabled=False):
            torch.autograd.grad(
                ends, sources, [torch.ones_like(e) for e in ends], allow_unused=True
            )


def _clock(device: torch.device | None, own_thread: bool) -> Callable[[], int]:
    """Return a clock in ns: this thread's CPU time or wall time; synchronised with a device."""
    if device is None:
        return time.thread_time_ns if own_thread else time.perf_counter_ns

    def finished() -> int:
        torch.cuda.synchronize(device)
        return time.perf_counter_ns()

    return finished


@contextlib.contextmanager
def _isolated(device: torch.device | None) -> Iterator[None]:
    """Hide calls from random generators, saved-tensor hooks and dispatch modes."""
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
    forked = torch.random.fork_rng(devices=[] if device is None else [device])
    with forked, hooks, _disable_current_modes():
        yield


def _time_ratios(
    steps: Mapping[str, Callable[[], None]], own_thread: bool, blocks: int = _BLOCKS
) -> dict[str, float]:
    """Return the time of the first step over that of each, as the median of pairs."""
    arms = [
        CallableArm(name, step, own_thread=own_thread, repeatable=False)
        for name, step in steps.items()
    ]
    first, metric = next(iter(steps)), "cpu" if own_thread else "wall"
    settings = ExperimentSettings(first, primary=metric, budget_s=_BUDGET_S, looks=())
    plan = MeasurePlan(
        minimum_warmup_s=0.0, maximum_warmup_s=0.0, maximum_blocks=blocks, guard=False,
        red_factor=1.0,
    )  # fmt: skip
    measured = run(arms, settings, environment=from_facts({}), plan=plan)
    return {
        name: 1.0 if name == first else ratio_between(measured, metric, first, name).estimate
        for name in steps
    }
