"""Trace a model with example inputs into one functional graph of ATen operators."""

from __future__ import annotations

import copy
import traceback
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.export import Dim
from torch.fx import GraphModule, Node
from torch.fx.graph import CodeGen
from torch.utils._pytree import tree_unflatten

from slipstream.errors import InvalidArgumentError, WorkloadError
from slipstream.units import with_article

_VIEWS = frozenset({
    "view", "slice", "select", "transpose", "permute", "split", "split_with_sizes", "chunk",
    "unbind", "expand", "narrow", "getitem",
})  # fmt: skip


def op_name(node: Node) -> str:
    """Return the name of an operator without its overload, such as ``conv2d``; empty for none."""
    target: Any = node.target
    schema = getattr(target, "_schema", None)
    if node.op != "call_function":
        return ""
    return str(schema.name).removeprefix("aten::") if schema else str(target.__name__)


def owner_of(node: Node) -> str:
    """Return the qualified name of the innermost module that runs `node`; empty for the model."""
    stack = node.meta.get("nn_module_stack")
    path = str(list(stack.values())[-1][0]) if stack else ""
    return "" if path.startswith("_empty") else path


def shape_of(value: Any) -> tuple[int, ...]:
    """Return the shape of a traced tensor; a symbolic batch has the size of the example."""
    return tuple(n if isinstance(n, int) else int(n.node.hint) for n in value.shape)


def trace(model: object, inputs: Sequence[Any]) -> GraphModule:
    """Trace a copy of `model` in eval mode; dimension 0 of the inputs stays variable if it can.

    In-place operators become out-of-place ones.

    Args:
        model: module that takes `inputs` positionally.
        inputs: example tensors; a batch of 1 is repeated, since sizes of 1 cannot vary.

    Raises:
        InvalidArgumentError: `model` is not a module.
        WorkloadError: control flow or shapes depend on data, or a tensor is written in place
            through a view. The error names the source line or module.
    """
    if not isinstance(model, nn.Module):
        kind = with_article(type(model).__name__)
        raise InvalidArgumentError("model", f"{kind} is not a torch.nn.Module")
    tensors = [x for x in inputs if isinstance(x, torch.Tensor) and x.numel()]
    if len(tensors) < len(inputs) or not tensors:
        raise WorkloadError(
            "the example inputs are not all tensors with elements", where="inputs",
            remedy="pass a tuple of tensors, and wrap the model if it takes other arguments",
        )  # fmt: skip
    copied = copy.deepcopy(model).eval()
    if all(x.dim() and x.shape[0] == 1 for x in tensors):
        tensors = [torch.cat([x, x]) for x in tensors]
    shapes = tuple({0: Dim.AUTO} if x.dim() else {} for x in tensors)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            program = torch.export.export(copied, tuple(tensors), dynamic_shapes=(
                {"args": shapes} if _variadic(copied) else shapes
            ))  # fmt: skip
        except Exception as error:
            raise _untraceable(copied, tensors, error) from error
        # The guards of `module()` are not part of the network.
        module = program.module(check_guards=False)
    assert isinstance(module, GraphModule)
    _restore_outputs(module, program.call_spec.out_spec)
    _functionalise(module)
    return module


def _restore_outputs(module: GraphModule, spec: Any) -> None:
    """Return the model's own structure of outputs, and take inputs one by one."""
    output = next(node for node in module.graph.nodes if node.op == "output")
    output.args = (tree_unflatten(list(output.args[0]), spec),)
    module.graph.set_codegen(CodeGen())


def _variadic(model: nn.Module) -> bool:
    import inspect

    kinds = [p.kind for p in inspect.signature(model.forward).parameters.values()]
    return inspect.Parameter.VAR_POSITIONAL in kinds


def _untraceable(
    model: nn.Module, inputs: Sequence[torch.Tensor], error: BaseException
) -> WorkloadError:
    """Return an error with the line of the model's code at which tracing stopped."""
    what, remedy = "the model cannot be traced", (
        "replace control flow and shapes that depend on tensor values (torch.where, masks), or "
        "derive the space from the submodule without them"
    )  # fmt: skip
    try:
        with torch.no_grad():
            model(*inputs)
    except Exception as failure:
        what, remedy = "the model fails on the example inputs", "pass inputs that it accepts"
        error = failure
    where, names = type(model).__name__, {id(m): name for name, m in model.named_modules()}
    cause: BaseException | None = error
    while cause is not None:
        for frame, line in traceback.walk_tb(cause.__traceback__):
            owner = frame.f_locals.get("self")
            if isinstance(owner, nn.Module) and frame.f_code.co_name == "forward":
                is_torch = type(owner).__module__.startswith("torch.nn.")
                layer = names.get(id(owner)) if is_torch else ""
                place = f"layer {layer}" if layer else f"{frame.f_code.co_filename}:{line}"
                where = f"{type(owner).__name__}.forward, {place}"
        cause = cause.__cause__
    text = str(error).strip().splitlines()
    first = text[0].rstrip(".") if text else type(error).__name__
    return WorkloadError(f"{what}: {first}", where=where, remedy=remedy)


def _functionalise(module: GraphModule) -> None:
    graph = module.graph
    order = {node: n for n, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        schema = getattr(node.target, "_schema", None)
        if schema is None or not schema.is_mutable:
            continue
        written, name = node.args[0], op_name(node)
        packet = getattr(torch.ops.aten, name.removesuffix("_"), None)
        overload = getattr(packet, schema.overload_name or "default", None)
        if not name.endswith("_") or overload is None or op_name(written) in _VIEWS:
            raise WorkloadError(
                f"{name} writes to a tensor in place", where=owner_of(node) or "the model",
                remedy="assign the result of an out-of-place operator instead",
            )  # fmt: skip
        node.target = overload
        later = [user for user in written.users if order[user] > order[node]]
        for user in later:
            user.replace_input_with(written, node)
    graph.eliminate_dead_code()
    module.recompile()
