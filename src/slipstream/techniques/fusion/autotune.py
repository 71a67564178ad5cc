"""Which kernels a step is faster with: the step itself, run with them and without.

Before that, on the first call, every kernel is run beside the operators it replaces, on what they
are given: one whose numbers are not theirs is never used.

A kernel that is faster by itself may cost the step what it saves: tracing has changed the operators
around it, and what it leaves in the caches is what they find. So a traced piece of a model is run
in its own order on what its first call is given, forward and backward. Every region's kernel is
timed in its place beside its operators in theirs; then the piece with the kernels that pay is timed
against the piece as the user wrote it and against inductor's compilation of it, alternately. The
fastest of the three is what every call runs.
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
from slipstream.measure import CallableArm, ExperimentSettings, run
from slipstream.measure.claims import ratio_between
from slipstream.measure.environment import from_facts
from slipstream.measure.runner import RunPlan as MeasurePlan
from slipstream.techniques.fusion.calls import lean
from slipstream.techniques.fusion.kernels import Kernel
from slipstream.techniques.fusion.lowering import Region
from slipstream.techniques.fusion.rewrite import FusionPlan, rewritten

try:
    from torch.fx.graph import _BoxedCodeGen
except ImportError:  # an older torch
    _BoxedCodeGen = None  # type: ignore[assignment, misc]

MOST = 0.98
"""Kernels replace operators only where that takes at most this share of their time."""
WRITTEN, FUSED, INDUCTOR = "the model as written", "the generated kernels", "inductor"
_BLOCKS, _BUDGET_S = 7, 15.0
# Candidates are a few percent apart, and 7 pairs on a busy machine say no more than 6 %.
_FINAL_BLOCKS = 41
_OPERATORS, _KERNELS = "operators", "kernels"
# How far a region's results may be from its operators', of their size: sums in another order, and
# numbers that torch rounds between operators. By the least precise tensor of the region.
_APART = {"float16": 0.02, "bfloat16": 0.05, "float32": 1e-3, "float64": 1e-8}
_Work = Callable[..., Any]
Make = Callable[[Sequence[Region]], list[Kernel]]


class TracedPass:
    """A traced forward or backward pass, with a kernel for each of its regions and without.

    Args:
        make: the kernels of regions.

    Attributes:
        run: what a call of the pass runs: with all kernels, or those that `keep` was told.
        fused: the pass with those kernels.
        regions: how many there are.
        beside: what calls saw after `compare`.
    """

    beside: Beside

    def __init__(self, module: GraphModule, planned: FusionPlan, make: Make) -> None:
        self._module, self._planned = module, planned
        self._kernels = make(planned.regions)
        self.fused = rewritten(module, planned, self._kernels)
        self.run: _Work = boxed(self.fused)
        self.regions = len(planned.regions)
        self._watched: dict[str, _Watched] = {}

    def compare(self) -> None:
        """Let calls run the operators, and the kernels beside them."""
        self.beside = Beside(self._module, self._planned, self._kernels)
        self.run = self.beside.boxed_run

    def watch(self, name: str, clock: Callable[[], int]) -> None:
        """Let calls run the operators or all kernels, each with a clock on every region."""
        if name not in self._watched:
            graph, members = self._planned.traced.nodes, self._planned.members
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
        """Of each region, whether its kernel takes less time in its place than its operators."""
        operators, kernels = (
            [median(one.spent_ns.get(n, [0])[-_BLOCKS:]) for n in range(self.regions)]
            for one in (self._watched[_OPERATORS], self._watched[_KERNELS])
        )
        return [k <= MOST * o for o, k in zip(operators, kernels, strict=True)]

    def keep(self, chosen: Sequence[bool]) -> None:
        """Run the kernels of those regions, from now on."""
        kernels = [one for one, wanted in zip(self._kernels, chosen, strict=True) if wanted]
        self._watched.clear()
        self._planned, self._kernels, self.regions = (
            self._planned.only(chosen),
            kernels,
            len(kernels),
        )
        self.fused = rewritten(self._module, self._planned, kernels)
        self.run = boxed(self.fused if kernels else self._module)


def boxed(module: GraphModule) -> _Work:
    """A traced graph as a function of the list of its arguments, which it clears.

    So a tensor's memory is free after its last use, as in eager mode: what a backward pass is given
    would otherwise lie there until it is over, and no tensor could be made where one was just read.
    """
    module = lean(module)
    if _BoxedCodeGen is None:
        unpacked = module.forward
        return lambda given: unpacked(*given)
    module.graph.set_codegen(_BoxedCodeGen())
    module.recompile()
    return module.forward


class _Watched(Interpreter):
    """Runs a graph node by node.

    Attributes:
        spent_ns: by region, what its nodes took in each run.
    """

    def __init__(
        self, module: GraphModule, region_of: Mapping[Node, int], clock: Callable[[], int]
    ) -> None:
        super().__init__(module)
        self.spent_ns: dict[int, list[int]] = {}
        self._region_of, self._clock = region_of, clock
        self._now = -1

    def run(self, *given: Any, **options: Any) -> Any:
        for region in set(self._region_of.values()):
            self.spent_ns.setdefault(region, []).append(0)
        return super().run(*given, **options)

    def run_node(self, n: Node) -> Any:
        self._now = self._region_of.get(n, -1)
        return super().run_node(n)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        return self._timed(super().call_function, target, args, kwargs)

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        return self._timed(super().call_module, target, args, kwargs)

    def _timed(self, call: _Work, *given: Any) -> Any:
        if self._now < 0:
            return call(*given)
        began = self._clock()
        result = call(*given)
        self.spent_ns[self._now][-1] += self._clock() - began
        return result


class Beside(Interpreter):
    """Runs operators, and each region's kernel on what they were given.

    Attributes:
        apart: by region, how far its results are from its operators', of their size.
        wrong: by region, why its kernel cannot stand for its operators.
    """

    def __init__(self, module: GraphModule, planned: FusionPlan, kernels: Sequence[Kernel]) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.apart: dict[int, float] = {}
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
                self.apart[number] = self._distance(number)
            except CompileError as error:
                self.wrong[number] = error.what
                continue
            nest = self._planned.regions[number].nest
            close = max(_APART.get(one.dtype, 0.0) for one in (*nest.inputs, *nest.outputs))
            if self.apart[number] > close:
                self.wrong[number] = "a kernel's numbers are not those of its operators"
        return self.env[n]

    def _distance(self, number: int) -> float:
        region, traced = self._planned.regions[number], self._planned.traced
        values: dict[int, Tensor] = {}
        for n in self._planned.members[number]:
            value = self.env[traced.nodes[n]]
            several = value if isinstance(value, (list, tuple)) else (value,)
            present = [one for one in several if isinstance(one, Tensor)]
            values |= dict(zip(traced.outputs[n], present, strict=True))
        given = [self.env[one] for one in region.reads]
        nest = region.nest
        sums = {store.output for store in nest.stores if store.column}
        whole = [_norm(x) for x in given
                 if x.is_floating_point() and x.numel() == nest.rows * nest.columns]  # fmt: skip
        # Numbers that cancel in a sum over rows leave less than what rounding leaves of them.
        floor = min(whole, default=0.0)
        pairs = zip(region.makes, self._kernels[number](*given), strict=True)
        return max(
            _apart(ours, values[value], floor if place in sums else 0.0)
            for place, (value, ours) in enumerate(pairs)
        )


def _norm(x: Tensor) -> float:
    """Of the numbers of `x` that are numbers."""
    return float(x.double().nan_to_num(0.0, 0.0, 0.0).norm())


def _apart(ours: Tensor, theirs: Tensor, floor: float) -> float:
    """The norm of the difference over that of `theirs`, which counts as `floor` at least.

    Infinite where a number of one alone is infinite or none.
    """
    a, b = ours.double(), theirs.double()
    same = (a == b) | (a.isnan() & b.isnan())
    apart = torch.where(same, 0.0, a - b)
    if not bool(apart.isfinite().all()):
        return math.inf
    size = max(_norm(theirs), floor)
    return float(apart.norm()) / size if size else float("inf" if apart.any() else 0.0)


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
    """Why inductor is not a candidate."""
    line = str(error).strip().partition("\n")[0]
    return f"inductor fails: {type(error).__name__}: {line}"


class Autotuned:
    """A traced piece of a model; its first call chooses what every call runs.

    Args:
        plain: the piece as the user wrote it.
        traced: the same through `passes`, which `compare` until it was called.
        reasons: why candidates are not used; more are added when it is called.
        waiting: calls that run as the user wrote them before the choice.
        compiled: inductor's compilation for the inputs of the first call; None to leave it out.

    Attributes:
        choice: what every call runs: `WRITTEN`, `FUSED` or `INDUCTOR`; None until it was called.
        gains: of each candidate that was timed, how many times as fast as written it is.
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

    def __call__(self, *given: Any) -> Any:
        if self._run is None:
            # A model in DistributedDataParallel is compiled by buckets, each of which is called on
            # fake tensors first, for the shapes of the next. AOTAutograd answers that call.
            if any(isinstance(tensor, FakeTensor) for tensor in given):
                return self._traced(*given)
            if self._waiting:
                self._waiting -= 1
                return self._plain(*given)
            self.choice, self._run = self._choose(given)
        return self._run(*given)

    def _choose(self, inputs: Sequence[Any]) -> tuple[str, _Work]:
        device = next((x.device for x in inputs if isinstance(x, Tensor) and x.is_cuda), None)
        own_thread = device is None and torch.get_num_threads() == 1
        candidates = {WRITTEN: self._plain}
        with _unseen(device):
            try:
                if self._fuse(inputs, _clock(device, own_thread), own_thread):
                    candidates[FUSED] = self._traced
                else:
                    self.reasons.append("no region of its operators is faster as a kernel")
            except Exception as error:  # of kernels; the user's own come again from the plain piece
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
                    self.gains = _in_turns(steps, own_thread, _FINAL_BLOCKS)
            except Exception as error:  # the model as written remains
                self.reasons.append(f"the candidates cannot be timed: {error}")
        best = max(self.gains, key=self.gains.__getitem__, default=WRITTEN)
        if best != WRITTEN and self.gains[best] * MOST < 1.0:
            best = WRITTEN
        for name, gain in self.gains.items():
            if name not in (WRITTEN, best):
                what = "its kernels make" if name == FUSED else "inductor makes"
                self.reasons.append(f"{what} the pass {gain:.2f} times as fast: too little")
        return best, candidates[best]

    def _fuse(self, inputs: Sequence[Any], clock: Callable[[], int], own_thread: bool) -> bool:
        """Keep the kernels that are faster in their places; return whether there are any."""
        if not self._passes:
            return False

        def watched(name: str) -> Callable[[], None]:
            def step() -> None:
                for traced in self._passes:
                    traced.watch(name, clock)
                _step(self._traced, inputs)

            return step

        # Kernels beside their operators; a backward pass may be traced only now.
        _step(self._traced, inputs)
        for traced in self._passes:
            self.reasons += sorted(set(traced.beside.wrong.values()))
            traced.keep([n not in traced.beside.wrong for n in range(traced.regions)])
        _in_turns({name: watched(name) for name in (_OPERATORS, _KERNELS)}, own_thread)
        for traced in self._passes:
            traced.keep(traced.faster())
        return any(traced.regions for traced in self._passes)


def _step(call: _Work, given: Sequence[Any]) -> None:
    """Forward and, where gradients are recorded, backward, on tensors of nobody else's.

    What is written in place is a copy; what has a gradient shares its memory and not its hooks.
    """
    twins = [
        one if not isinstance(one, Tensor)
        else one.detach().requires_grad_() if one.requires_grad else one.detach().clone()
        for one in given
    ]  # fmt: skip
    outputs = call(*twins)
    ends = [one for one in outputs if isinstance(one, Tensor) and one.requires_grad]
    sources = [one for one in twins if isinstance(one, Tensor) and one.requires_grad]
    if ends and sources:
        with torch.autocast(ends[0].device.type, enabled=False):
            torch.autograd.grad(
                ends, sources, [torch.ones_like(e) for e in ends], allow_unused=True
            )


def _clock(device: torch.device | None, own_thread: bool) -> Callable[[], int]:
    """Nanoseconds; on a device those that it has worked, too."""
    if device is None:
        return time.thread_time_ns if own_thread else time.perf_counter_ns

    def finished() -> int:
        torch.cuda.synchronize(device)
        return time.perf_counter_ns()

    return finished


@contextlib.contextmanager
def _unseen(device: torch.device | None) -> Iterator[None]:
    """Nobody sees what runs here: not the generators, hooks of saved tensors, modes of dispatch."""
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
    forked = torch.random.fork_rng(devices=[] if device is None else [device])
    with forked, hooks, _disable_current_modes():
        yield


def _in_turns(
    steps: Mapping[str, Callable[[], None]], own_thread: bool, blocks: int = _BLOCKS
) -> dict[str, float]:
    """How many times as long the first step takes as each: the median of pairs."""
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
