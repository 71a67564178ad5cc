"""The statistic "sparsity": shares of exact zeros in inputs and outputs of modules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slipstream.capture.modules import ROOT
from slipstream.graph import ModuleZeros

if TYPE_CHECKING:
    import torch

_MATRIX = 2


@dataclass
class _Count:
    """Counts of zeros and of all numbers."""

    zeros: int = 0
    numbers: int = 0

    def add(self, tensor: torch.Tensor) -> None:
        import torch

        self.zeros += tensor.numel() - int(torch.count_nonzero(tensor.detach()))
        self.numbers += tensor.numel()

    @property
    def share(self) -> float | None:
        return self.zeros / self.numbers if self.numbers else None


@dataclass
class _Around:
    inputs: _Count
    outputs: _Count
    gradients: _Count


class Zeros:
    """Context manager that counts zeros around modules of `model` that compute something.

    These are the modules without children, and those with direct parameters.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._modules: dict[int, tuple[str, torch.nn.Module]] = {}
        for name, module in model.named_modules():
            if not list(module.children()) or list(module.parameters(recurse=False)):
                self._modules[id(module)] = (f"{ROOT}.{name}" if name else ROOT, module)
        self._found: dict[int, _Around] = {}
        self._hooks: list[Any] = []

    def __enter__(self) -> Zeros:
        for _, module in self._modules.values():
            self._hooks += [
                module.register_forward_pre_hook(self._before, with_kwargs=True),
                module.register_forward_hook(self._after),
            ]
        return self

    def __exit__(self, *error: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def result(self, steps: int) -> tuple[ModuleZeros, ...]:
        """Return the modules that ran in `steps` steps, in the model's order."""
        modules = []
        for key, (name, module) in self._modules.items():
            if key not in self._found:
                continue
            around, weights = self._found[key], _Count()
            for parameter in module.parameters(recurse=False):
                if parameter.dim() >= _MATRIX:
                    weights.add(parameter)
            modules.append(
                ModuleZeros(
                    module=name,
                    kind=type(module).__name__,
                    elements=around.outputs.numbers // max(steps, 1),
                    inputs=around.inputs.share,
                    outputs=around.outputs.share,
                    gradients=around.gradients.share,
                    weights=weights.share,
                )
            )
        return tuple(modules)

    def _around(self, module: torch.nn.Module) -> _Around:
        return self._found.setdefault(id(module), _Around(_Count(), _Count(), _Count()))

    def _before(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        first = next(iter((*args, *kwargs.values())), None)
        tensor = _floating(first)
        if tensor is not None:
            self._around(module).inputs.add(tensor)

    def _after(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        tensor = _floating(output)
        if tensor is None:
            return
        around = self._around(module)
        around.outputs.add(tensor)
        if tensor.requires_grad:
            # The hook applies to this version: later in-place changes have a separate gradient.
            tensor.register_hook(around.gradients.add)


def _floating(value: Any) -> Any:
    """Return `value`, or its first item, if it is a dense floating-point tensor, else None."""
    import torch

    if isinstance(value, (tuple, list)):
        value = value[0] if value else None
    dense = isinstance(value, torch.Tensor) and value.layout is torch.strided
    return value if dense and value.is_floating_point() else None
