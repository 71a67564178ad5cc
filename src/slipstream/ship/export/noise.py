"""Measure the noise that int8 adds to each layer, compared with the PyTorch model."""

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

_MAX_LAYERS = 5


@dataclass(frozen=True)
class LayerNoise:
    """Signal-to-noise ratio of a layer's int8 values.

    Attributes:
        layer: qualified name of its module.
        decibels: ratio of its output.
        lost: `decibels` below those of its noisiest input.
    """

    layer: str
    decibels: float
    lost: float


def layer_noise(
    model: torch.nn.Module, content: bytes, inputs: torch.Tensor
) -> tuple[LayerNoise, ...]:
    """Return the noise of each layer, in execution order.

    Args:
        content: the .tflite file exported from `model`.
        inputs: float32 [n, ...], as the model takes them.

    Raises:
        MissingExtraError: LiteRT, which runs the .tflite, is not installed.
    """
    traced, tap = trace(model, inputs[:1]), LiteRTTap(content, reference=True)
    tapped_layers = (*tap.inputs, *tap.layers)
    signal, noise = dict.fromkeys(traced.shapes, 0.0), dict.fromkeys(traced.shapes, 0.0)
    for sample in inputs.split(1):
        reference = traced.run(sample)
        codes = tap.coded([_channels_last(sample)])
        for tapped, value in zip(tapped_layers, (*codes, *tap.run(codes)[1]), strict=True):
            if tapped.name in reference and value is not None:
                real = _channels_last(reference[tapped.name]).reshape(value.shape)
                signal[tapped.name] += float((real**2).sum())
                noise[tapped.name] += float(((tapped.real(value) - real) ** 2).sum())
    decibels = {
        name: 10 * math.log10(signal[name] / noise[name])
        for name in signal
        if signal[name] and noise[name]
    }
    layers = []
    for layer in traced.layers:
        before = min(decibels.get(name, math.inf) for name in layer.inputs)
        if layer.kind == "reshape":
            decibels[layer.output] = before
        elif layer.output in decibels and before < math.inf:
            level = decibels[layer.output]
            layers.append(LayerNoise(layer.source or layer.output, level, before - level))
    return tuple(layers)


def noise_table(noise: Sequence[LayerNoise]) -> Table:
    """Return a table of the layers that lose most."""
    fields: list[Field[LayerNoise]] = [
        Field.of("layer", lambda entry: entry.layer),
        Field.number("signal to noise, dB", lambda entry: f"{entry.decibels:.1f}"),
        Field.number("loss, dB", lambda entry: f"{entry.lost:.1f}"),
    ]
    worst = sorted(noise, key=lambda entry: -entry.lost)[:_MAX_LAYERS]
    notes = [
        "int8 compared with float on the calibration inputs; 20 dB is a relative error of 10 %"
    ]
    return Table.of(worst, fields, "layers that lose most", notes)


def _channels_last(values: torch.Tensor) -> Array:
    values = values.unsqueeze(2) if values.dim() == 3 else values
    moved = values.permute(0, 2, 3, 1) if values.dim() == 4 else values
    return np.ascontiguousarray(moved.detach().float().numpy())
