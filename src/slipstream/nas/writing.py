"""Write an exported sub-network as Python source that needs only torch."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import torch
from torch import nn
from torch.fx import GraphModule

from slipstream.files import write_text
from slipstream.nas.supernet import attach

_HEADER = f'''\
"""A sub-network exported by slipstream; load it with load(), which reads the weights next to it."""

from pathlib import Path

import torch
from torch import device, inf, nn, nan


{inspect.getsource(attach)}

def load():
    net = Subnet()
    weights = torch.load(Path(__file__).with_suffix(".pt"), weights_only=True)
    net.load_state_dict(weights, assign=True)
    return net.eval()


class Subnet(nn.Module):
    def __init__(self):
        super().__init__()
'''


def write_module(module: GraphModule, path: Path) -> None:
    """Write the source of `module` to `path`, and its weights next to it with the suffix ``.pt``.

    Args:
        module: result of `Supernet.export`.
    """
    lines = [_HEADER.rstrip("\n")]
    layers = {
        name: layer
        for name, layer in module.named_modules()
        if type(layer) is not nn.Module and type(layer).__module__.startswith("torch.nn.modules")
    }
    for name, layer in layers.items():
        # torch prints these two without quotes.
        made = re.sub("padding=(same|valid)", r"padding='\1'", repr(layer))
        lines.append(f'        attach(self, "{name}", nn.{made})')
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if name.rpartition(".")[0] in layers:
            continue
        made = f"torch.zeros({tuple(tensor.shape)}, dtype={tensor.dtype})"
        if isinstance(tensor, nn.Parameter):
            made = f"nn.Parameter({made}, {tensor.requires_grad})"
        lines.append(f'        attach(self, "{name}", {made})')
    code = module.graph.python_code("self").src
    lines += ["", *("    " + line if line else "" for line in code.strip().splitlines()), ""]
    write_text(path, "\n".join(lines))
    torch.save(module.state_dict(), path.with_suffix(".pt"))
