"""The live model through torch.compile, as a user would do it, with a clock in every region.

Source: Ansel et al., "PyTorch 2: Faster Machine Learning Through Dynamic Python Bytecode
Transformation and Graph Compilation", ASPLOS 2024.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from slipstream.capture.events import StepEvents, mark, profiler, steps_of
from slipstream.errors import WorkloadError

# Compiling happens in the first step, compiling again where something differs in the second.
_FEWEST_WARMUP, _MOST_WARMUP = 3, 6
STEPS_PER_TURN = 3
_SHOWN = 160


@dataclass
class Region:
    """One compiled function.

    Attributes:
        backward: whether it computes gradients.
        operators: of the graph it was made from.
        saved_bytes: what a forward one keeps for its backward, parameters and inputs not counted.
        steps_ns: by step: time in it.
    """

    backward: bool
    operators: int
    saved_bytes: int
    spent_ns: int = 0
    steps_ns: list[int] = field(default_factory=list)

    def to_json(self, factor: float) -> dict[str, Any]:
        """The least time of a step, times `factor`, and how it spreads."""
        lower, middle, upper = np.percentile(self.steps_ns, [25, 50, 75])
        return {
            "phase": "backward" if self.backward else "forward",
            "operators": self.operators,
            "saved_bytes": self.saved_bytes,
            "ns": min(self.steps_ns) * factor,
            "spread": float((upper - lower) / 2 / max(middle, 1.0)),
        }


def compiled_call(model: Any, **options: Any) -> Callable[..., Any]:
    """What ``torch.compile(model, **options)`` calls; it compiles at its first call.

    Put in ``model._compiled_call_impl``, where ``model.compile()`` puts its own, it takes effect
    for everybody who holds the model.
    """
    import torch

    call = model._call_impl

    # torch skips its own frames: a bare nn.Sequential compiles only from within another one.
    def forward(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    return torch.compile(forward, **options)


def use_compiled(model: Any, mode: str) -> None:
    """Compile `model` in place, in this process alone: no pool of workers could outlive it.

    Raises:
        WorkloadError: it is compiled already.
    """
    import torch._inductor.config as inductor

    inductor.compile_threads = 1
    put_compiled(model, mode=mode)


def put_compiled(model: Any, **options: Any) -> None:
    """Let every call of `model` go through ``torch.compile(model, **options)``.

    Raises:
        WorkloadError: it is compiled already.
    """
    if compiled_already(model):
        raise WorkloadError("the model is compiled already", remedy="measure it as it is")
    model._compiled_call_impl = compiled_call(model, **options)


def compiled_already(model: Any) -> bool:
    """Whether the model, or a part of it, goes through torch.compile."""
    return any(
        getattr(module, "_compiled_call_impl", None) is not None
        or type(module).__name__ == "OptimizedModule"
        or hasattr(module.forward, "_torchdynamo_orig_callable")
        for module in model.modules()
    )


def nothing(reason: str, remedy: str = "") -> dict[str, Any]:
    """What is recorded in place of regions where there are none."""
    return {"reason": reason, "remedy": remedy}


class Compiling:
    """Within it, `model` can be called compiled, with a clock in every region.

    Attributes:
        regions: in the order they were compiled.
        compile_s: CPU time of compiling, the C++ compiler's included; a busy machine's wall time
            would say little.
        cached: whether torch had compiled the like before, and kept it.
        step_ns: a compiled step after warming up.
    """

    def __init__(self, model: Any, threads: int, report: Callable[[str], None]) -> None:
        self._model = model
        self._clock = time.thread_time_ns if threads == 1 else time.perf_counter_ns
        self._report = report
        self._stack = contextlib.ExitStack()
        self._reasons: list[Any] = []
        self._call: Callable[..., Any] | None = None
        self.regions: list[Region] = []
        self._failure: dict[str, Any] | None = None
        self.compile_s = 0.0
        self.cached = False
        self.step_ns = 0

    def __enter__(self) -> Compiling:
        self._report("compiling the model")
        import torch._functorch.config as functorch
        import torch._inductor.config as inductor
        from torch._dynamo.utils import counters, graph_break_reasons

        # In this process: no pool of workers could outlive it.
        self._stack.enter_context(inductor.patch(compile_threads=1))

        # Its entries would come back without our clocks.
        self._stack.enter_context(functorch.patch(enable_autograd_cache=False))
        self._counters = counters
        self._hits = counters["inductor"]["fxgraph_cache_hit"]
        self._all_reasons = graph_break_reasons
        self._first_reason = len(graph_break_reasons)
        self._stack.callback(setattr, self._model, "_compiled_call_impl", None)
        self._call = compiled_call(self._model, backend=self._backend)
        return self

    def __exit__(self, *error: object) -> None:
        self._reasons = list(self._all_reasons[self._first_reason :])
        self._stack.close()

    def warm_up(self) -> Generator[None, Any, None]:
        """Compiled steps until nothing is compiled any more."""
        self._model._compiled_call_impl = self._safely
        walls: list[int] = []
        costs: list[float] = []
        while len(walls) < _MOST_WARMUP and self._failure is None:
            known = len(self.regions)
            begun, spent = time.perf_counter_ns(), _cpu_s()
            yield
            walls.append(time.perf_counter_ns() - begun)
            costs.append(_cpu_s() - spent)
            if len(walls) >= _FEWEST_WARMUP and len(self.regions) == known:
                break
        self._model._compiled_call_impl = None
        self.step_ns = min(walls)
        self.compile_s = sum(costs) - len(costs) * min(costs)
        self.cached = self._counters["inductor"]["fxgraph_cache_hit"] > self._hits

    def why_not(self) -> dict[str, Any] | None:
        """Why it could not be compiled, while the steps went on without; None if it could."""
        return self._failure

    def turn(self, *, compiled: bool) -> Generator[None, Any, list[int]]:
        """A few steps of one kind; their times."""
        self._model._compiled_call_impl = self._safely if compiled else None
        times_ns: list[int] = []
        for _ in range(STEPS_PER_TURN):
            for region in self.regions:
                region.spent_ns = 0
            begun = self._clock()
            yield
            times_ns.append(self._clock() - begun)
            if compiled:
                for region in self.regions:
                    region.steps_ns.append(region.spent_ns)
        return times_ns

    def profiled(self) -> Generator[None, Any, list[StepEvents]]:
        """The events of a few compiled steps."""
        self._model._compiled_call_impl = self._safely
        with profiler() as watching:
            mark()
            for _ in range(STEPS_PER_TURN):
                yield
                mark()
        self._model._compiled_call_impl = None
        return steps_of(watching.profiler.kineto_results.events())

    def breaks(self) -> list[dict[str, str]]:
        """Why and where the graph broke, each once."""
        places: dict[str, str] = {}
        for one in self._reasons or self._all_reasons[self._first_reason :]:
            reason = str(one.reason).strip().partition("\n")[0]
            if one.graph_break and reason != "step_unsupported":
                frame = one.user_stack[-1] if one.user_stack else None
                place = f"{os.path.basename(frame.filename)}:{frame.lineno}" if frame else ""
                places.setdefault(reason[:_SHOWN], place)
        return [{"reason": reason, "where": where} for reason, where in places.items()]

    def first_break(self) -> str:
        """The first graph break in words, to end a sentence with."""
        for one in self.breaks():
            return f": {one['reason']}" + (f" ({one['where']})" if one["where"] else "")
        return ""

    def _safely(self, *args: Any, **kwargs: Any) -> Any:
        """The compiled call; when it cannot be compiled, the plain one from then on."""
        if self._failure is None and self._call is not None:
            try:
                return self._call(*args, **kwargs)
            except Exception as error:
                self._failed(error)
        return self._model._call_impl(*args, **kwargs)

    def _failed(self, error: BaseException) -> None:
        if self._failure is not None:
            return  # known from where it arose; torch wraps it on its way up
        text = f"{type(error).__name__}: {error}"
        if "C++ compiler" in text or "CppCompileError" in text:
            self._failure = nothing(
                "torch.compile needs a working C++ compiler", "install g++, or name one in $CXX"
            )
            return
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        self._failure = nothing(
            f"torch.compile fails: {(lines or [type(error).__name__])[0][:_SHOWN]}",
            "it fails without slipstream too; TORCH_LOGS=dynamo says more",
        )

    def _backend(self, graph: Any, inputs: Sequence[Any]) -> Any:
        from torch._inductor.compile_fx import compile_fx

        return compile_fx(graph, inputs, inner_compile=self._compile)

    def _compile(self, graph: Any, inputs: Sequence[Any], **options: Any) -> Any:
        """As ``compile_fx_inner``, with a clock in what it returns."""
        from torch._inductor.compile_fx import compile_fx_inner

        backward = bool(options.get("is_backward"))
        nodes = [node for node in graph.graph.nodes if node.op == "call_function"]
        kind = "backward" if backward else "forward"
        self._report(f"compiling {len(nodes)} {kind} operators")
        try:
            compiled: Any = compile_fx_inner(graph, inputs, **options)
        except Exception as error:
            self._failed(error)
            raise
        saved = 0 if backward or options.get("is_inference") else _saved_bytes(graph)
        region = Region(backward, len(nodes), saved)
        call, clock = compiled.current_callable, self._clock

        def timed(values: Any) -> Any:
            begun = clock()
            try:
                return call(values)
            finally:
                region.spent_ns += clock() - begun

        compiled.current_callable = timed
        self.regions.append(region)
        return compiled


def _cpu_s() -> float:
    """CPU time of this process and of those it started and waited for."""
    return sum(os.times()[:4])


def _saved_bytes(graph: Any) -> int:
    """Bytes that the forward `graph` returns for the backward one, each storage once."""
    from torch._guards import TracingContext

    context = TracingContext.try_get()
    meta = context.fw_metadata if context is not None else None
    if meta is None:
        return 0
    outputs = graph.graph.find_nodes(op="output")[0].args[0]
    given = {_storage(node) for node in graph.graph.find_nodes(op="placeholder")}
    returned = {_storage(node) for node in outputs[: meta.num_forward_returns]}
    sizes: dict[int | None, int] = {}
    for node in outputs[meta.num_forward_returns :]:
        storage = _storage(node)
        if storage is not None and storage not in given | returned:
            sizes[storage] = node.meta["val"].untyped_storage().nbytes()
    return sum(sizes.values())


def _storage(node: Any) -> int | None:
    import torch

    value = getattr(node, "meta", {}).get("val")
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else None
