"""Back end for torch.compile that runs regions of the traced model as generated kernels."""

from __future__ import annotations

import copy
import warnings
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import CompileContext
from torch.fx import GraphModule
from torch.nn import functional

from slipstream.capture import put_compiled
from slipstream.codegen import CompileError, why_no_triton
from slipstream.codegen.rows import UnsupportedError
from slipstream.codegen.rows_kernels import row_kernels
from slipstream.errors import SlipstreamWarning
from slipstream.surgery.fx import CyclicReplacementError, stack_parts
from slipstream.techniques.dropout.nn import SeededDropout
from slipstream.techniques.fusion.autotune import (
    WRITTEN,
    Autotuned,
    Make,
    TracedPass,
    boxed,
    failure,
    inductor,
)
from slipstream.techniques.fusion.plan import plan

# Calls with new shapes before kernels are tuned for them: not for the last batch of an epoch.
_CALLS_BEFORE_TUNING = 16
_pieces: weakref.WeakSet[Autotuned] = weakref.WeakSet()


def seeded_dropout(
    input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> torch.Tensor:
    """``functional.dropout`` that draws its mask again when it needs it."""
    if not training or p == 0.0 or input.numel() == 0:
        return input
    supported = input.is_cpu or (input.is_cuda and why_no_triton() is None)
    if not supported or not input.is_floating_point() or p == 1.0:
        return functional.dropout(input, p, training)
    seed = torch.randint(-(2**63), 2**63 - 1, (2,), dtype=torch.int64, device=input.device)
    dropped: torch.Tensor = SeededDropout.apply(input.contiguous(), seed, p)
    return dropped


def _compiled_before() -> bool:
    """Whether torch.compile recompiles code for other inputs."""
    compile_id = CompileContext.current_compile_id()
    return compile_id is not None and bool(compile_id.frame_compile_id)


def _symbolic(inputs: Sequence[Any]) -> bool:
    """Whether a size is symbolic."""
    sizes = (x.shape if isinstance(x, torch.Tensor) else (x,) for x in inputs)
    return any(isinstance(size, torch.SymInt) for shape in sizes for size in shape)


class FusionBackend:
    """Back end of ``torch.compile(model, backend=...)``, called with every traced graph.

    Args:
        report: called with a line for every graph that stays unchanged, and why.
        tuned: whether the first call of a graph selects the kernels that make it faster; if False,
            all kernels run.
        make: makes the kernels of nests; by default for the device of their tensors.
        inductor: whether inductor's compilation of a graph is a candidate, too.

    Attributes:
        passes: forward and backward passes of every compiled graph.
        pieces: graphs of the model, each with its own choice.
    """

    def __init__(
        self, report: Callable[[str], None] = lambda line: None, tuned: bool = True,
        make: Make = row_kernels, inductor: bool = True,
    ) -> None:  # fmt: skip
        self.passes: list[TracedPass] = []
        self.pieces: list[Autotuned] = []
        self._report = report
        self._tuned, self._make, self._inductor = tuned, make, inductor
        self._reasons: list[list[str]] = []

    @property
    def reasons(self) -> list[str]:
        """Reasons why candidates were not used, graph by graph."""
        return [reason for reasons in self._reasons for reason in reasons]

    def __call__(self, module: GraphModule, inputs: Sequence[Any]) -> Any:
        plain = GraphModule(module, copy.deepcopy(module.graph))
        for node in module.graph.nodes:
            dropout = node.op == "call_function" and node.target is functional.dropout
            if dropout and not (node.kwargs.get("inplace") or any(node.args[3:])):
                node.target = seeded_dropout
        module.recompile()
        passes: list[TracedPass] = []
        reasons: list[str] = []
        self._reasons.append(reasons)

        def compile_pass(traced: GraphModule, inputs: Sequence[Any]) -> Any:
            fused = self._pass(traced, inputs, reasons)
            if fused is not None:
                passes.append(fused)
                if self._tuned:
                    fused.compare()
            run = boxed(traced) if fused is None else lambda tensors: fused.run(tensors)

            def call(arguments: list[Any]) -> Any:
                return run(arguments)

            call._boxed_call = True  # type: ignore[attr-defined]
            return call

        compile_with = aot_autograd(
            fw_compiler=compile_pass,
            bw_compiler=compile_pass,
            inference_compiler=compile_pass,
            partition_fn=min_cut_rematerialization_partition,
        )
        traced = compile_with(module, inputs)
        if not self._tuned:
            return traced
        again = _compiled_before() and not _symbolic(inputs) and (passes or self._inductor)
        waiting = _CALLS_BEFORE_TUNING if again else 0
        if waiting:
            warnings.warn(
                f"fusion: the model is called with other shapes or modes than before; {waiting} "
                "calls run as written, then kernels and inductor are compiled and timed, which may "
                "take a minute",
                SlipstreamWarning, stacklevel=2,
            )  # fmt: skip
        rival = self._rival(plain, inputs, reasons)
        piece = Autotuned(plain, traced, passes, reasons, waiting, rival)
        self.pieces.append(piece)
        _pieces.add(piece)
        return piece

    def _rival(
        self, plain: GraphModule, inputs: Sequence[Any], reasons: list[str]
    ) -> Callable[[Sequence[Any]], Any] | None:
        """Return a function that compiles with inductor, for `Autotuned`.

        Compilation waits for the first call, except with symbolic sizes: inductor's assumptions
        about them become guards only while torch.compile is tracing.
        """
        if not self._inductor:
            return None
        if not _symbolic(inputs):
            return partial(inductor, plain)
        try:
            compiled = inductor(plain, inputs)
        except Exception as error:
            reasons.append(failure(error))
            return None
        return lambda inputs: compiled

    def _pass(
        self, module: GraphModule, inputs: Sequence[Any], reasons: list[str]
    ) -> TracedPass | None:
        """A traced pass with kernels, or None with one more reason."""
        if _symbolic(inputs):
            reasons.append("kernels need constant sizes")
            return None
        try:
            stack_parts(module)
            planned = plan(module)
            if not planned.regions:
                reasons.append("none of its operators can share a kernel")
                return None
            self.passes.append(TracedPass(module, planned, self._make))
        except (CompileError, UnsupportedError, CyclicReplacementError) as error:
            reason = error.what if isinstance(error, CompileError) else str(error)
            reasons.append(reason)
            self._report(f"a graph of {len(module.graph.nodes)} nodes stays unchanged: {reason}")
            return None
        return self.passes[-1]


def use_fused(model: Any) -> None:
    """Route calls of `model` through torch.compile with this back end, if that is faster.

    If the first call chooses the model as written, later ones bypass torch.compile, whose guards
    and wrappers take up to 2 % of a step of 20 ms.

    Raises:
        WorkloadError: the model is already compiled.
    """
    backend = FusionBackend()
    put_compiled(model, backend=backend, dynamic=False)
    compiled = model._compiled_call_impl

    def call(*args: Any, **kwargs: Any) -> Any:
        returned = compiled(*args, **kwargs)
        if all(piece.choice == WRITTEN for piece in backend.pieces):
            model._compiled_call_impl = None
        return returned

    model._compiled_call_impl = call


def explain() -> list[str]:
    """Return a line for each graph that fusion traced and this process still uses.

    It names what every call runs, the measured speed of each candidate relative to the model as
    written, and why others were not used, such as a missing compiler.
    """
    lines = []
    for piece in _pieces:
        gains = ", ".join(f"{name} {gain:.2f}x" for name, gain in piece.gains.items())
        line = f"runs {piece.choice}" if piece.choice else "not called yet"
        lines.append("; ".join(part for part in (line, gains, *piece.reasons) if part))
    return lines


def slipstream_fusion(module: GraphModule, inputs: Sequence[Any]) -> Any:
    """``torch.compile(model, backend="slipstream_fusion")``.

    The first call chooses the fastest of eager mode, kernels and inductor.
    """
    return FusionBackend()(module, inputs)
