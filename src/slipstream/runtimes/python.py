"""Runtimes for Python code: a workload's torch module, and plain functions."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.errors import WorkloadError
from slipstream.runtimes.runtime import Array, ModelError, Runtime, TensorSpec
from slipstream.workload import BuiltWorkload, Workload, drive


class TorchRuntime(Runtime):
    """A workload's model with its techniques, in inference mode.

    Inputs have the shapes of the workload's batch, with any number of samples. `samples` holds that
    batch as arrays; `module` is the model; `positional` whether it takes its inputs by position.

    Args:
        module: the model, which is set to evaluation mode.
        batch: input of a step: a tensor, several, a mapping, or one of these with targets.
        threads: threads per operator, for the whole process; 0 to leave the setting.
    """

    kind = "torch"

    def __init__(self, name: str, module: Any, batch: Any, loss: Any = None, threads: int = 1):
        import torch

        if threads:
            torch.set_num_threads(threads)
        inputs, self.targets = batch, None
        if loss is not None and isinstance(batch, (tuple, list)) and len(batch) == 2:
            inputs, targets = batch
            self.targets = targets.numpy() if isinstance(targets, torch.Tensor) else None
        self._names = list(inputs) if isinstance(inputs, Mapping) else None
        self.positional = self._names is None
        tensors = [inputs] if isinstance(inputs, torch.Tensor) else list(_values(inputs))
        if not tensors or not all(isinstance(t, torch.Tensor) and t.dim() for t in tensors):
            raise ModelError(
                f"the inputs of {name} are not tensors of samples",
                remedy="return (model, inputs) or (model, (inputs, targets), loss)",
            )
        self.samples = [tensor.detach().cpu().numpy() for tensor in tensors]
        names = self._names or [f"input_{n}" for n in range(len(tensors))]
        self.module = module.eval()
        self._mode = torch.inference_mode
        self._from_numpy = torch.from_numpy
        super().__init__(name, list(map(_spec, names, self.samples)))
        outputs = self.run([array[:1] for array in self.samples])
        self.outputs = tuple(_spec(f"output_{n}", array) for n, array in enumerate(outputs))

    @classmethod
    def of_workload(
        cls, workload: Workload, keep_in: Path, threads: int = 1, seed: int = 0
    ) -> TorchRuntime:
        """Build the model of `workload` in this process.

        Raises:
            WorkloadError: the user's code fails, is a plain script, or has no model.
        """
        if workload.function is None:
            raise WorkloadError(
                f"{workload.name} is a script, not a model",
                remedy=f"pass a function that returns (model, batch): {workload.name}:make",
            )

        def keep(built: BuiltWorkload) -> Generator[None, Any, BuiltWorkload]:
            yield from ()
            return built

        built = drive(workload, keep, _leave, keep_in=keep_in, seed=seed)
        if built.model is None:
            raise WorkloadError(f"{workload.name} has a step, but no model")
        return cls(workload.name, built.model, built.batch, built.loss, threads)

    def _run(self, inputs: Sequence[Array]) -> list[Array]:
        tensors = [self._from_numpy(array) for array in inputs]
        with self._mode():
            if self._names is not None:
                output = self.module(**dict(zip(self._names, tensors, strict=True)))
            else:
                output = self.module(*tensors)
        if isinstance(output, Mapping) or hasattr(output, "to_tuple"):
            output = tuple(output.values())
        outputs = output if isinstance(output, (tuple, list)) else (output,)
        return [t.float().numpy() if _bf16(t) else t.numpy() for t in outputs]


class CallableRuntime(Runtime):
    """A function that takes arrays [N, ...], one per input, and returns one array or several."""

    kind = "callable"

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        super().__init__(name)
        self._function = function

    def _run(self, inputs: Sequence[Array]) -> list[Array]:
        output = self._function(*inputs)
        if isinstance(output, (tuple, list)):
            return [np.asarray(array) for array in output]
        return [np.asarray(output)]


def function_at(target: str) -> Callable[..., Any]:
    """Run the file of ``file.py:function`` as a module and return the function.

    Raises:
        WorkloadError: there is no such file or function.
    """
    path, _, name = target.rpartition(":")
    file = Path(path).resolve()
    if not file.is_file():
        raise WorkloadError(f"there is no file '{path}'", remedy="check the path")
    module = sys.modules.get(f"slipstream_user_{file.stem}")
    if module is None or module.__file__ != str(file):
        if str(file.parent) not in sys.path:
            sys.path.insert(0, str(file.parent))
        spec = importlib.util.spec_from_file_location(f"slipstream_user_{file.stem}", file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    function: Any = getattr(module, name, None)
    if not callable(function):
        raise WorkloadError(f"'{name}' is not a function of this file", where=path)
    return function  # type: ignore[no-any-return]


def required_parameters(function: Callable[..., Any]) -> int:
    """Return the number of required positional parameters; 1 for ``*args`` alone."""
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(function).parameters.values()
    needed = sum(
        parameter.kind in positional and parameter.default is parameter.empty
        for parameter in parameters
    )
    return needed or int(
        any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters)
    )


def _values(inputs: Any) -> Sequence[Any]:
    return list(inputs.values()) if isinstance(inputs, Mapping) else list(inputs or ())


def _spec(name: str, array: Array) -> TensorSpec:
    return TensorSpec(name, array.dtype.name, (None, *array.shape[1:]))


def _bf16(tensor: Any) -> bool:
    return str(tensor.dtype) == "torch.bfloat16"


def _leave(result: Any) -> Any:
    raise AssertionError("only a script is left early")
