"""Model families of ``slipstream bench cuda``: those of `slipstream_bench.models`, on a device.

Each function is a workload: ``(model, batch, loss, optimizer)``, with a batch that fills a device
but for the tiny one, whose device waits for its host.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from slipstream_bench import models

_TRAINED = tuple[nn.Module, Any, Any, torch.optim.Optimizer]


def language_model(batch_size: int = 256) -> _TRAINED:
    """A causal transformer over 4096 words."""
    return _there(models.language_model(batch_size))


def tiny_language_model(batch_size: int = 8) -> _TRAINED:
    """A causal transformer whose kernels are shorter than their launches."""
    return _there(models.tiny_language_model(batch_size))


def conv_net(batch_size: int = 1024) -> _TRAINED:
    """A residual network on 32 x 32 images."""
    return _there(models.conv_net(batch_size))


def perceptron(batch_size: int = 16384) -> _TRAINED:
    """Three wide linear layers."""
    return _there(models.perceptron(batch_size))


def _there(parts: _TRAINED) -> _TRAINED:
    """Parameters stay the same objects, so that the optimizer has them."""
    model, batch, loss, optimizer = parts
    return model.cuda(), tree_map(lambda x: x.cuda(), batch), loss, optimizer


FAMILIES = (language_model, tiny_language_model, conv_net, perceptron)
