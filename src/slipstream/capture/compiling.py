"""Run the live model through torch.compile, with a clock in every region.

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

# The first step compiles; the second recompiles if something differs.
_MIN_WARMUP, _MAX_WARMUP = 3, 6
STEPS_PER_TURN = 3
_MAX_CHARACTERS = 160


@dataclass
class Region:
    """One compiled function.

    Attributes:
        backward: Whether it computes gradients.
        operators: Number of operators of its graph.
        saved_bytes: Bytes that a forward region saves for backward, without parameters and inputs.
        steps_ns: Time in the region, by step.
    """

    backward: bool
    operators: int
    saved_bytes: int
    spent_ns: int = 0
    steps_ns: list[int] = field(default_factory=list)

    def to_json(self, factor: float) -> dict[str, Any]:
        """Convert to JSON, with the minimum time of a step times `factor`, and its spread."""
        lower, middle, upper = np.percentile(self.steps_ns, [25, 50, 75])
        return {
            "phase": "backward" if self.backward else "forward",
            "operators": self.operators,
            "saved_bytes": self.saved_bytes,
            "ns": min(self.steps_ns) * factor,
            "spread": float((upper - lower) / 2 / max(middle, 1.0)),
        }


def compiled_call(model: Any, **options: Any) -> Callable[..., Any]:
    """Return the callable of ``torch.compile(model, **options)``, which compiles when first called.

    Assigned to ``model._compiled_call_impl``, as ``model.compile()`` does, it takes effect for
    every reference to the model.
    """
    import torch

    call = model._call_impl

    # torch skips its own frames: a bare nn.Sequential compiles only within another function.
    def forward(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    return torch.compile(forward, **options)


def use_compiled(model: Any, mode: str) -> None:
    """Compile `model` in place, without a pool of workers, which could outlive this process.

    Raises:
        WorkloadError: The model is already compiled.
    """
    import torch._inductor.config as inductor

    inductor.compile_threads = 1
    put_compiled(model, mode=mode)


def put_compiled(model: Any, **options: Any) -> None:
    """Route every call of `model` through ``torch.compile(model, **options)``.

    Raises:
        WorkloadError: The model is already compiled.
    """
    if compiled_already(model):
        raise WorkloadError("the model is already compiled", remedy="measure it without compile")
    model._compiled_call_impl = compiled_call(model, **options)


def compiled_already(model: Any) -> bool:
    """Whether the model or a part of it is compiled by torch.compile."""
    return any(
        getattr(module, "_compiled_call_impl", None) is not None
        or type(module).__name__ == "OptimizedModule"
        or hasattr(module.forward, "_torchdynamo_orig_callable")
        for module in model.modules()
    )


def graph_breaks(records: Sequence[Any]) -> list[dict[str, str]]:
    """Return the distinct reasons and places of items of torch's ``graph_break_reasons``."""
    places: dict[str, str] = {}
    for record in records:
        reason = str(record.reason).strip().partition("\n")[0]
        if record.graph_break and reason != "step_unsupported":
            frame = record.user_stack[-1] if record.user_stack else None
            place = f"{os.path.basename(frame.filename)}:{frame.lineno}" if frame else ""
            places.setdefault(reason[:_MAX_CHARACTERS], place)
    return [{"reason": reason, "where": where} for reason, where in places.items()]


def no_regions(reason: str, remedy: str = "") -> dict[str, Any]:
    """Return the record of a step without compiled regions."""
    return {"reason": reason, "remedy": remedy}


class Compiling:
    """Context manager that compiles `model`, with a clock in every region.

    Attributes:
        regions: Regions in the order they were compiled.
        compile_s: CPU time of compiling, including the C++ compiler, since wall time depends on
            other load.
        cached: Whether torch found the code in its cache.
        step_ns: Time of a compiled step after warm-up.
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

        # Without a pool of workers, which could outlive this process.
        self._stack.enter_context(inductor.patch(compile_threads=1))

        # Cached entries lack the clocks.
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
        """Run compiled steps until no more regions are compiled."""
        self._model._compiled_call_impl = self._call_or_fall_back
        walls: list[int] = []
        costs: list[float] = []
        while len(walls) < _MAX_WARMUP and self._failure is None:
            count = len(self.regions)
            begun, spent = time.perf_counter_ns(), _cpu_s()
            yield
            walls.append(time.perf_counter_ns() - begun)
            costs.append(_cpu_s() - spent)
            if len(walls) >= _MIN_WARMUP and len(self.regions) == count:
                break
        self._model._compiled_call_impl = None
        self.step_ns = min(walls)
        self.compile_s = sum(costs) - len(costs) * min(costs)
        self.cached = self._counters["inductor"]["fxgraph_cache_hit"] > self._hits

    def why_not(self) -> dict[str, Any] | None:
        """Return why compiling failed (steps then run eagerly); None if it succeeded."""
        return self._failure

    def turn(self, *, compiled: bool) -> Generator[None, Any, list[int]]:
        """Run a few compiled or eager steps and return their times in ns."""
        self._model._compiled_call_impl = self._call_or_fall_back if compiled else None
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
        """Run a few compiled steps and return their events."""
        self._model._compiled_call_impl = self._call_or_fall_back
        with profiler() as watching:
            mark()
            for _ in range(STEPS_PER_TURN):
                yield
                mark()
        self._model._compiled_call_impl = None
        return steps_of(watching.profiler.kineto_results.events())

    def breaks(self) -> list[dict[str, str]]:
        """Return the distinct reasons of graph breaks, and their places."""
        return graph_breaks(self._reasons or self._all_reasons[self._first_reason :])

    def first_break(self) -> str:
        """Return the first graph break as the end of a sentence; empty without any."""
        for found in self.breaks():
            return f": {found['reason']}" + (f" ({found['where']})" if found["where"] else "")
        return ""

    def _call_or_fall_back(self, *args: Any, **kwargs: Any) -> Any:
        """Call the compiled model; after a failure, the eager one."""
        if self._failure is None and self._call is not None:
            try:
                return self._call(*args, **kwargs)
            except Exception as error:
                self._failed(error)
        return self._model._call_impl(*args, **kwargs)

    def _failed(self, error: BaseException) -> None:
        if self._failure is not None:
            return  # already recorded at its origin; torch wraps it on the way up
        text = f"{type(error).__name__}: {error}"
        if "C++ compiler" in text or "CppCompileError" in text:
            self._failure = no_regions(
                "torch.compile needs a working C++ compiler", "install g++, or set CXX"
            )
            return
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        self._failure = no_regions(
            f"torch.compile fails: {(lines or [type(error).__name__])[0][:_MAX_CHARACTERS]}",
            "it also fails without slipstream; see the output of TORCH_LOGS=dynamo",
        )

    def _backend(self, graph: Any, inputs: Sequence[Any]) -> Any:
        from torch._inductor.compile_fx import compile_fx

        return compile_fx(graph, inputs, inner_compile=self._compile)

    def _compile(self, graph: Any, inputs: Sequence[Any], **options: Any) -> Any:
        """Compile with ``compile_fx_inner``, and add a clock to the result."""
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
    """Return the CPU time of this process and of children that it waited for."""
    return sum(os.times()[:4])


def _saved_bytes(graph: Any) -> int:
    """Return the bytes of distinct storages that the forward `graph` saves for backward."""
    from torch._guards import TracingContext

    context = TracingContext.try_get()
    meta = context.fw_metadata if context is not None else None
    if meta is None:
        return 0
    outputs = graph.graph.find_nodes(op="output")[0].args[0]
    inputs = {_storage(node) for node in graph.graph.find_nodes(op="placeholder")}
    returned = {_storage(node) for node in outputs[: meta.num_forward_returns]}
    sizes: dict[int | None, int] = {}
    for node in outputs[meta.num_forward_returns :]:
        storage = _storage(node)
        if storage is not None and storage not in inputs | returned:
            sizes[storage] = node.meta["val"].untyped_storage().nbytes()
    return sum(sizes.values())


def _storage(node: Any) -> int | None:
    import torch

    value = getattr(node, "meta", {}).get("val")
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else None
