"""Layers of quadratic neurons that keep no more for the backward pass than first-order ones."""

from slipstream.techniques.quadratic.neurons import NEURONS, Neuron
from slipstream.techniques.quadratic.nn import QuadraticConv2d as Conv2d
from slipstream.techniques.quadratic.nn import QuadraticLinear as Linear
from slipstream.techniques.quadratic.nn import convert, converted

__all__ = ["NEURONS", "Conv2d", "Linear", "Neuron", "convert", "converted"]
