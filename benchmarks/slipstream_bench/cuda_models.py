"""Model families of ``slipstream bench cuda``: those of `slipstream_bench.models` on a GPU.

Each function is a workload, ``(model, batch, loss, optimizer)``. Its batch fills the GPU, except in
the tiny model, whose GPU waits for the host.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from slipstream_bench import models

_TRAINED = tuple[nn.Module, Any, Any, torch.optim.Optimizer]


def language_model(batch_size: int = 256) -> _TRAINED:
    """Build a causal transformer over 4096 words."""
    return _on_cuda(models.language_model(batch_size))


def tiny_language_model(batch_size: int = 8) -> _TRAINED:
    """Build a causal transformer whose kernels are shorter than their launches."""
    return _on_cuda(models.tiny_language_model(batch_size))


def conv_net(batch_size: int = 1024) -> _TRAINED:
    """Build a residual network on 32 x 32 images."""
    return _on_cuda(models.conv_net(batch_size))


def perceptron(batch_size: int = 16384) -> _TRAINED:
    """Build three wide linear layers."""
    return _on_cuda(models.perceptron(batch_size))


def _on_cuda(parts: _TRAINED) -> _TRAINED:
    """Move the model in place, since the optimizer refers to its parameters."""
    model, batch, loss, optimizer = parts
    return model.cuda(), tree_map(lambda x: x.cuda(), batch), loss, optimizer


FAMILIES = (language_model, tiny_language_model, conv_net, perceptron)
