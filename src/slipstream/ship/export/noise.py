"""What int8 adds to each layer: values of the exported model beside those of the PyTorch one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from slipstream.runtimes.taps import LiteRTTap
from slipstream.ship.export.floats import trace
from slipstream.ship.firmware.network import Array
from slipstream.tables import Field, Table

_SHOWN = 5


@dataclass(frozen=True)
class LayerNoise:
    """How far a layer's int8 values are from its float ones.

    Attributes:
        layer: its module.
        decibels: signal over noise of what it gives.
        lost: decibels less than the noisiest of what it reads.
    """

    layer: str
    decibels: float
    lost: float


def layer_noise(
    model: torch.nn.Module, content: bytes, inputs: torch.Tensor
) -> tuple[LayerNoise, ...]:
    """The layers in the order they run in.

    Args:
        content: the .tflite that was made of `model`.
        inputs: float32 [n, ...], as the model takes them.

    Raises:
        MissingExtraError: LiteRT, which runs the .tflite, is not installed.
    """
    traced, tap = trace(model, inputs[:1]), LiteRTTap(content, reference=True)
    shown = (*tap.inputs, *tap.layers)
    signal, noise = dict.fromkeys(traced.shapes, 0.0), dict.fromkeys(traced.shapes, 0.0)
    for one in inputs.split(1):
        wanted = traced.run(one)
        codes = tap.coded([_channels_last(one)])
        for layer, value in zip(shown, (*codes, *tap.run(codes)[1]), strict=True):
            if layer.name in wanted and value is not None:
                real = _channels_last(wanted[layer.name]).reshape(value.shape)
                signal[layer.name] += float((real**2).sum())
                noise[layer.name] += float(((layer.real(value) - real) ** 2).sum())
    decibels = {
        name: 10 * math.log10(signal[name] / noise[name])
        for name in signal
        if signal[name] and noise[name]
    }
    layers = []
    for one in traced.layers:
        before = min(decibels.get(name, math.inf) for name in one.inputs)
        if one.kind == "reshape":
            decibels[one.output] = before
        elif one.output in decibels and before < math.inf:
            level = decibels[one.output]
            layers.append(LayerNoise(one.source or one.output, level, before - level))
    return tuple(layers)


def noise_table(noise: Sequence[LayerNoise]) -> Table:
    """The layers that lose most."""
    fields: list[Field[LayerNoise]] = [
        Field.of("layer", lambda one: one.layer),
        Field.number("signal to noise, dB", lambda one: f"{one.decibels:.1f}"),
        Field.number("lost in it, dB", lambda one: f"{one.lost:.1f}"),
    ]
    worst = sorted(noise, key=lambda one: -one.lost)[:_SHOWN]
    notes = ["int8 beside float on the calibration inputs; 20 dB are a relative error of 10 %"]
    return Table.of(worst, fields, "layers that lose most", notes)


def _channels_last(values: torch.Tensor) -> Array:
    values = values.unsqueeze(2) if values.dim() == 3 else values
    moved = values.permute(0, 2, 3, 1) if values.dim() == 4 else values
    return np.ascontiguousarray(moved.detach().float().numpy())
