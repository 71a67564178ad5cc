"""Stacked members of one architecture: each member computes a contiguous part of the batch.

Every layer holds all members' weights, [members, ...], and is computed by the method that was
measured to be faster for its shape: one batched matmul (a grouped convolution), or member by
member. Members with shared weights differ by a factor for each input and each output.

Source: batched products over models, Wang et al., "HFTA: Horizontally Fused Training Array", MLSys
2021; shared weights, Wen et al., "BatchEnsemble", ICLR 2020.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional

from slipstream.errors import InvalidArgumentError, WorkloadError
from slipstream.measure import time_function
from slipstream.surgery import place

Weights = Literal["own", "shared"]
Way = Literal["together", "in_turn"]
_SAMPLES = 3


class _Layer(nn.Module):
    """A layer of all members, for inputs [members * N, ...] in the order of members.

    Attributes:
        way: how it is computed; None for the faster way, as measured once per shape.
        weight: [members, out, in, ...], or [out, in, ...] if shared.
        bias: [members, out], or None.
        fan_in, fan_out: factors [members, in] and [members, out] of shared weights, else None.
    """

    weight: nn.Parameter
    bias: Any
    fan_in: Any
    fan_out: Any

    def __init__(self, layers: Sequence[Any], weights: Weights) -> None:
        super().__init__()
        first, self.count = layers[0], len(layers)
        self.way: Way | None = None
        self.fan_in = self.fan_out = None
        if weights == "own":
            self.weight = nn.Parameter(self._stored([layer.weight.detach() for layer in layers]))
        else:
            self.weight = nn.Parameter(first.weight.detach().clone())
            inputs = first.weight.shape[1] * getattr(first, "groups", 1)
            for name, width in (("fan_in", inputs), ("fan_out", len(first.weight))):
                signs = torch.randint(0, 2, (self.count, width)).to(first.weight) * 2 - 1
                setattr(self, name, nn.Parameter(signs))
        self.bias = (
            None
            if first.bias is None
            else nn.Parameter(torch.stack([layer.bias.detach() for layer in layers]))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the layer for [members * N, ...]."""
        if len(x) % self.count:
            raise InvalidArgumentError(
                "x", f"{len(x)} rows are not a multiple of {self.count} members"
            )
        output: torch.Tensor
        if self.fan_in is not None:
            output = self._shared(x.unflatten(0, (self.count, -1))).flatten(0, 1)
        elif (self.way or self._faster(x)) == "together":
            output = self._together(x)
        else:
            output = self._in_turn(x.unflatten(0, (self.count, -1)))
        return output

    def _stored(self, weights: Sequence[torch.Tensor]) -> torch.Tensor:
        """Stack weights to [members, out, in, ...], in the memory layout of the layer."""
        return torch.stack(list(weights))

    def _faster(self, x: torch.Tensor) -> Way:
        if torch._C._get_tracing_state() or torch.compiler.is_compiling():
            return "together"
        training = torch.is_grad_enabled() and self.weight.requires_grad
        return _measured(
            isinstance(self, StackedConv2d), self._settings(), self.count,
            tuple(self.weight.shape[1:]), tuple(x.shape), x.dtype, training,
            torch.get_num_threads(),
        )  # fmt: skip

    def _settings(self) -> tuple[Any, ...]:
        return ()

    def _in_turn(self, rows: torch.Tensor) -> torch.Tensor:
        biases = [None] * self.count if self.bias is None else self.bias.unbind()
        outputs = map(self._one, rows.unbind(), self.weight.unbind(), biases)
        return torch.cat(list(outputs))

    def _one(self, x: Any, weight: Any, bias: Any) -> Any:
        raise NotImplementedError

    def _together(self, x: torch.Tensor) -> Any:
        raise NotImplementedError

    def _shared(self, rows: torch.Tensor) -> Any:
        """Compute all rows with one weight, between the members' factors."""
        output = self._one(
            (rows * self._broadcast(self.fan_in, rows)).flatten(0, 1), self.weight, None
        )
        output = output.unflatten(0, (self.count, -1))
        output = output * self._broadcast(self.fan_out, output)
        return output if self.bias is None else output + self._broadcast(self.bias, output)

    def _broadcast(self, values: Any, rows: torch.Tensor) -> Any:
        """Reshape [members, channels] so that it broadcasts with `rows`."""
        raise NotImplementedError


class StackedLinear(_Layer):
    """``nn.Linear`` of all members, over rows of any number of dimensions."""

    def _one(self, x: Any, weight: Any, bias: Any) -> Any:
        return functional.linear(x, weight, bias)

    def _stored(self, weights: Sequence[torch.Tensor]) -> torch.Tensor:
        """Stack weights in the layout of the batched matmul, which avoids copies."""
        return torch.stack([weight.t() for weight in weights]).transpose(1, 2)

    def _together(self, x: torch.Tensor) -> torch.Tensor:
        # Few operators: in a small layer their overhead exceeds the matmul.
        flat, weight = x.reshape(self.count, -1, x.shape[-1]), self.weight.transpose(1, 2)
        if self.bias is None:
            output = torch.bmm(flat, weight)
        else:
            output = torch.baddbmm(self.bias.unsqueeze(1), flat, weight)
        return output.view(-1, *x.shape[1:-1], output.shape[-1])

    def _broadcast(self, values: Any, rows: torch.Tensor) -> Any:
        return values.view(self.count, *[1] * (rows.dim() - 2), -1)


class StackedConv2d(_Layer):
    """``nn.Conv2d`` of all members; ``together`` computes one grouped convolution."""

    _convolve: Any = staticmethod(functional.conv2d)

    def __init__(self, layers: Sequence[Any], weights: Weights) -> None:
        super().__init__(layers, weights)
        first = layers[0]
        self._geometry = first.stride, first.padding, first.dilation, first.groups

    def _settings(self) -> tuple[Any, ...]:
        return self._geometry

    def _one(self, x: Any, weight: Any, bias: Any) -> Any:
        return self._convolve(x, weight, bias, *self._geometry)

    def _together(self, x: torch.Tensor) -> Any:
        images = x.unflatten(0, (self.count, -1)).transpose(0, 1).flatten(1, 2)
        bias = None if self.bias is None else self.bias.flatten()
        *geometry, groups = self._geometry
        output = self._convolve(
            images, self.weight.flatten(0, 1), bias, *geometry, groups * self.count
        )
        return output.unflatten(1, (self.count, -1)).transpose(0, 1).flatten(0, 1)

    def _broadcast(self, values: Any, rows: torch.Tensor) -> Any:
        return values.view(self.count, 1, -1, 1, 1)


class _Norm(nn.Module):
    """A norm of all members; parameters and buffers are [members, ...]."""

    weight: Any
    bias: Any
    running_mean: Any
    running_var: Any

    def __init__(self, layers: Sequence[Any], weights: Weights) -> None:
        super().__init__()
        first, self.count, self.eps = layers[0], len(layers), layers[0].eps
        for name in ("weight", "bias", "running_mean", "running_var"):
            values: list[Any] = [getattr(layer, name, None) for layer in layers]
            stacked: Any = None if values[0] is None else torch.stack(values).detach()
            if name in first._parameters and stacked is not None:
                stacked = nn.Parameter(stacked)
            if name in first._buffers:
                self.register_buffer(name, stacked)
            else:
                setattr(self, name, stacked)


class StackedNorm(_Norm):
    """Batch norm of all members, each over its own rows."""

    def __init__(self, layers: Sequence[Any], weights: Weights) -> None:
        super().__init__(layers, weights)
        self.momentum, self.tracks = layers[0].momentum, layers[0].track_running_stats

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise [members * N, channels, ...]."""
        states: list[Any] = [
            [None] * self.count if state is None else state.unbind()
            for state in (self.running_mean, self.running_var, self.weight, self.bias)
        ]
        settings = self.training or not self.tracks, self.momentum, self.eps
        normalise: Any = functional.batch_norm
        parts = zip(x.unflatten(0, (self.count, -1)).unbind(), *states, strict=True)
        return torch.cat([normalise(rows, *state, *settings) for rows, *state in parts])


class StackedLayerNorm(_Norm):
    """Layer norm of all members: a joint norm, then each member's scale and shift."""

    def __init__(self, layers: Sequence[Any], weights: Weights) -> None:
        super().__init__(layers, weights)
        self.shape = layers[0].normalized_shape

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise [members * N, ...]."""
        whole = functional.layer_norm(x, self.shape, None, None, self.eps)
        rows: torch.Tensor = torch.unflatten(whole, 0, (self.count, -1))
        shape = self.count, *[1] * (rows.dim() - 1 - len(self.shape)), *self.shape
        if self.weight is not None:
            rows = rows * self.weight.view(shape)
        if self.bias is not None:
            rows = rows + self.bias.view(shape)
        return torch.flatten(rows, 0, 1)


_KINDS: dict[type[nn.Module], Any] = {
    nn.Linear: StackedLinear, nn.Conv2d: StackedConv2d, nn.BatchNorm1d: StackedNorm,
    nn.BatchNorm2d: StackedNorm, nn.LayerNorm: StackedLayerNorm,
}  # fmt: skip


@functools.lru_cache(maxsize=512)
def _measured(
    convolves: bool, settings: tuple[Any, ...], count: int, weight: tuple[int, ...],
    rows: tuple[int, ...], dtype: torch.dtype, training: bool, threads: int,
) -> Way:  # fmt: skip
    """Time both ways for a shape, with backward pass if training, and return the faster."""
    with torch.random.fork_rng(devices=[]), torch.inference_mode(False):
        out, inputs, *kernel = weight
        module: Any
        if convolves:
            *geometry, groups = settings
            convolution: Any = nn.Conv2d
            module = convolution(
                inputs * groups, out, tuple(kernel), *geometry, groups, dtype=dtype
            )
        else:
            module = nn.Linear(inputs, out, dtype=dtype)
        layer = (StackedConv2d if convolves else StackedLinear)([module] * count, "own")
        x = torch.randn(rows, dtype=dtype)
        ways: tuple[Way, ...] = ("together", "in_turn")

        def run(way: Way) -> None:
            layer.way = way
            with torch.set_grad_enabled(training):
                y = layer(x)
                if training:
                    torch.autograd.grad(y, list(layer.parameters()), y)

        return fastest({way: functools.partial(run, way) for way in ways})  # type: ignore[return-value]


def fastest(arms: Mapping[str, Callable[[], object]]) -> str:
    """Return the arm with the shortest of a few interleaved runs, after a warm-up of each."""
    clock: Literal["cpu", "wall"] = "cpu" if torch.get_num_threads() == 1 else "wall"
    best = dict.fromkeys(arms, float("inf"))
    for sample in range(1 + _SAMPLES):
        for name, run in arms.items():
            elapsed = time_function(run)[clock]
            if sample:
                best[name] = min(best[name], elapsed)
    return min(best, key=lambda name: best[name])


def stack(model: nn.Module, members: Sequence[nn.Module], weights: Weights = "own") -> None:
    """Stack the layers of all `members` in `model`, in place.

    Its inputs and outputs are then [members * N, ...]. Layers without parameters are not changed,
    so the model's forward must treat rows of a batch independently.

    Args:
        members: models of the architecture of `model`, which may be one of them.
        weights: ``own`` for each member, or ``shared``: those of the first member for all.

    Raises:
        InvalidArgumentError: there is no member, or members have different shapes.
        WorkloadError: a layer with parameters cannot be stacked.
    """
    if not members:
        raise InvalidArgumentError("members", "is empty")
    shapes = [[(n, tuple(p.shape)) for n, p in member.named_parameters()] for member in members]
    if any(other != shapes[0] for other in shapes):
        raise InvalidArgumentError(
            "members", "have parameters of different shapes",
            remedy="stack only members of equal shapes; Ensemble.stacked() groups them",
        )  # fmt: skip
    layers = {}
    for name, module in model.named_modules():
        kind = type(module)
        if kind in _KINDS and getattr(module, "padding_mode", "zeros") == "zeros" and name:
            layers[name] = _KINDS[kind]([member.get_submodule(name) for member in members], weights)
            layers[name].train(module.training)
        elif any(True for _ in module.parameters(recurse=False)):
            raise WorkloadError(
                f"{kind.__name__} cannot be computed for several members in one step",
                where=name or "the model itself",
            )
    for name, module in layers.items():
        place(model, name, module)


class StackedEnsemble(nn.Module):
    """Members of equal shapes, computed together.

    Args:
        members, weights: see `stack`; members are copied.

    Raises:
        InvalidArgumentError, WorkloadError: see `stack`.
    """

    def __init__(self, members: Sequence[nn.Module], weights: Weights = "own") -> None:
        super().__init__()
        self.count, self.weights = len(members), weights
        wrapped = [nn.Sequential(copy.deepcopy(member)) for member in members]
        self.model = copy.deepcopy(wrapped[0]) if wrapped else nn.Sequential()
        stack(self.model, wrapped, weights)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Return every member's output for all of `x`, [members, N, ...]."""
        rows = x.expand(self.count, *x.shape).flatten(0, 1)
        outputs: torch.Tensor = self.model(rows).unflatten(0, (self.count, -1))
        return outputs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return outputs [members * N, ...] of a divided batch in training, else the members' mean.

        Gradients of own weights are those of a mean over each member's rows, of shared weights
        over all rows.
        """
        if not self.training:
            return self.logits(x).mean(0)
        y: torch.Tensor = self.model(x)
        return undivided(y, self.count) if self.weights == "own" else y


def redrawn(model: nn.Module, seed: int) -> nn.Module:
    """Return a copy with reinitialised parameters."""
    fresh = copy.deepcopy(model)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for module in fresh.modules():
            if callable(reset := getattr(module, "reset_parameters", None)):
                reset()
    return fresh


def undivided(y: torch.Tensor, count: int) -> torch.Tensor:
    """Multiply the gradient of `y` by `count`, for a loss that is a mean over all rows."""
    if y.requires_grad:
        y.register_hook(lambda gradient: gradient * count)
    return y
