"""The back end: torch.compile traces the user's model, its regions become kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.fx import GraphModule
from torch.nn import functional

from slipstream.codegen import CompileError
from slipstream.techniques.dropout.nn import SeededDropout
from slipstream.techniques.fusion.loops import UnsupportedError
from slipstream.techniques.fusion.lowering import Region
from slipstream.techniques.fusion.rewrite import Plan, plan, rewrite
from slipstream.techniques.fusion.timing import measured_faster


def seeded_dropout(
    input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> torch.Tensor:
    """``functional.dropout`` of a tensor on a processor, its mask drawn again where needed."""
    if not training or p == 0.0 or input.numel() == 0:
        return input
    if not input.is_cpu or not input.is_floating_point() or p == 1.0:
        return functional.dropout(input, p, training)
    seed = torch.randint(-(2**63), 2**63 - 1, (2,), dtype=torch.int64)
    dropped: torch.Tensor = SeededDropout.apply(input.contiguous(), seed, p)
    return dropped


class FusionBackend:
    """What ``torch.compile(model, backend=...)`` calls with every graph it traces.

    Args:
        say: told of every graph that stays as it is, and why.
        faster: of regions, whether each is faster as a kernel; all are kernels where None.

    Attributes:
        plans: of every graph that was compiled, forward and backward.
        reasons: why graphs stayed as they are.
    """

    def __init__(
        self,
        say: Callable[[str], None] = lambda line: None,
        faster: Callable[[Sequence[Region]], list[bool]] | None = None,
    ) -> None:
        self.plans: list[Plan] = []
        self.reasons: list[str] = []
        self._say = say
        self._faster = faster

    def __call__(self, module: GraphModule, inputs: Sequence[Any]) -> Any:
        for node in module.graph.nodes:
            plain = node.op == "call_function" and node.target is functional.dropout
            if plain and not (node.kwargs.get("inplace") or any(node.args[3:])):
                node.target = seeded_dropout
        module.recompile()
        compile_with = aot_autograd(
            fw_compiler=self._compile,
            bw_compiler=self._compile,
            inference_compiler=self._compile,
            partition_fn=min_cut_rematerialization_partition,
        )
        return compile_with(module, inputs)

    def _compile(self, module: GraphModule, inputs: Sequence[Any]) -> Any:
        return make_boxed_func(self.fused(module).forward)

    def fused(self, module: GraphModule) -> GraphModule:
        """A traced graph with kernels, or as it is with one more reason."""
        try:
            planned = plan(module)
            if self._faster is not None and planned.regions:
                planned = planned.only(self._faster(planned.regions))
            if not planned.regions:
                self.reasons.append("no region of its operators is faster as a kernel")
                return module
            rewritten = rewrite(module, planned)
        except (CompileError, UnsupportedError) as error:
            reason = error.what if isinstance(error, CompileError) else str(error)
            self.reasons.append(reason)
            self._say(f"a graph of {len(module.graph.nodes)} nodes stays as it is: {reason}")
            return module
        self.plans.append(planned)
        return rewritten


def slipstream_fusion(module: GraphModule, inputs: Sequence[Any]) -> Any:
    """``torch.compile(model, backend="slipstream_fusion")``: kernels where they are faster."""
    return FusionBackend(faster=measured_faster)(module, inputs)
