"""Common uses of a model, checked on one that a technique has changed."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

Make = Callable[[], nn.Module]
"""Returns the changed model, with the same weights at every call."""


def first(output: Any) -> torch.Tensor:
    """Return the tensor of an output that may be a tuple."""
    tensor: torch.Tensor = output[0] if isinstance(output, tuple) else output
    return tensor


def gradients(model: nn.Module, call: Any, x: torch.Tensor) -> list[torch.Tensor | None]:
    """Return gradients of the parameters after a forward and backward pass in evaluation mode."""
    model.zero_grad()
    first(call(x)).square().sum().backward()
    return [p.grad for p in model.parameters()]


@contextmanager
def process_group() -> Iterator[None]:
    """Make this process a process group of one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _same(ours: Any, theirs: Any, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(first(ours), first(theirs), rtol=tolerance, atol=tolerance)


def _copied(make: Make, x: torch.Tensor) -> None:
    model = make()
    twin = copy.deepcopy(model)
    _same(twin(x), model(x))
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    _same(make()(x), model(x))


def _pickled(make: Make, x: torch.Tensor) -> None:
    model, file = make(), io.BytesIO()
    model(x)
    torch.save(model, file)
    file.seek(0)
    _same(torch.load(file, weights_only=False)(x), model(x))


def _state(make: Make, x: torch.Tensor) -> None:
    model, other = make(), make()
    expected = first(model(x)).detach()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.normal_()
    other.load_state_dict(model.state_dict())
    _same(other(x), expected)


def _modes(make: Make, x: torch.Tensor) -> None:
    model = make()
    expected = first(model(x)).detach()
    assert all(module.training for module in model.train().modules())
    model(x)
    assert not any(module.training for module in model.eval().modules())
    model = make()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            _same(model(x), expected)


def _batches(make: Make, x: torch.Tensor) -> None:
    model = make()
    expected = first(model(x))
    _same(model(x[:1]), expected[:1])
    _same(model(torch.cat([x, x])), torch.cat([expected, expected]))


def _unbatched(make: Make, x: torch.Tensor) -> None:
    model = make()
    _same(model(x[0]), first(model(x))[0])


def _precisions(make: Make, x: torch.Tensor) -> None:
    expected = first(make()(x)).detach()
    with torch.autocast("cpu", torch.bfloat16):
        _same(first(make()(x)).float(), expected, 0.1)
    for dtype, tolerance in ((torch.float64, 1e-5), (torch.bfloat16, 0.2), (torch.float16, 0.05)):
        output = first(make().to(dtype)(x.to(dtype)))
        assert output.dtype is dtype
        _same(output.float(), expected, tolerance)


def _compiled(make: Make, x: torch.Tensor) -> None:
    torch._dynamo.reset()
    model, plain = make(), make()
    call = torch.compile(model, backend="aot_eager")
    for ours, theirs in zip(gradients(model, call, x), gradients(plain, plain, x), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def _replicas(make: Make, x: torch.Tensor) -> None:
    model, plain = make(), make()
    with process_group():
        replicas = DistributedDataParallel(model)
        for _ in range(2):
            ours = gradients(model, replicas, x)
    for gradient, other in zip(ours, gradients(plain, plain, x), strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-4, atol=1e-4)


def _frozen(make: Make, x: torch.Tensor) -> None:
    model = make()
    parameters = list(model.parameters())
    for parameter in parameters[::2]:
        parameter.requires_grad_(False)
    found = gradients(model, model, x)
    assert all(gradient is None for gradient in found[::2])
    assert all(gradient is not None for gradient in found[1::2])


def _hooked(make: Make, x: torch.Tensor) -> None:
    model, calls = make(), []
    handles = [m.register_forward_hook(lambda *ignored: calls.append(1)) for m in model.modules()]
    expected = first(model(x))
    assert calls
    for handle in handles:
        handle.remove()
    _same(model(x), expected)


USES: dict[str, Callable[[Make, torch.Tensor], None]] = {
    "deepcopy": _copied, "pickle": _pickled, "state_dict": _state, "train and eval": _modes,
    "other batch sizes": _batches, "unbatched": _unbatched, "precisions": _precisions,
    "torch.compile": _compiled, "DDP": _replicas, "frozen": _frozen, "hooks": _hooked,
}  # fmt: skip
"""By name; each raises if the model of `make` does not bear it on a batch x."""


def check_uses(make: Make, x: torch.Tensor, *, except_: tuple[str, ...] = ()) -> None:
    """Run every use except `except_`; raise all failures as one error.

    Args:
        make: see `Make`; put into evaluation mode here.
        x: a batch, first dimension first.
    """
    failures = []
    for name, use in USES.items():
        if name in except_:
            continue
        try:
            use(lambda: make().eval(), x)
        except Exception as error:
            failures.append(f"{name}: {type(error).__name__}: {error}")
    assert not failures, "\n".join(failures)
