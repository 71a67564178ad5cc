"""Models in Python: a torch module that a workload builds, and a plain function."""

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
    """The model of a workload, techniques applied, in inference mode.

    What it takes has the shapes of the workload's batch, of any number of samples. `samples` holds
    that batch, as arrays, for those who have no other data; `module` is the model itself.

    Args:
        module: in evaluation mode or not; it is put there.
        batch: what one step is fed: a tensor, several, a mapping, or any of these with targets.
        threads: inside an operator, for the whole process; 0 to leave them.
    """

    kind = "torch"

    def __init__(self, name: str, module: Any, batch: Any, loss: Any = None, threads: int = 1):
        import torch

        if threads:
            torch.set_num_threads(threads)
        fed, self.targets = batch, None
        if loss is not None and isinstance(batch, (tuple, list)) and len(batch) == 2:
            fed, targets = batch
            self.targets = targets.numpy() if isinstance(targets, torch.Tensor) else None
        self._names = list(fed) if isinstance(fed, Mapping) else None
        tensors = [fed] if isinstance(fed, torch.Tensor) else list(_values(fed))
        if not tensors or not all(isinstance(one, torch.Tensor) and one.dim() for one in tensors):
            raise ModelError(
                f"what {name} is fed is not tensors of samples",
                remedy="return (model, inputs) or (model, (inputs, targets), loss)",
            )
        self.samples = [one.detach().cpu().numpy() for one in tensors]
        names = self._names or [f"input_{n}" for n in range(len(tensors))]
        self.module = module.eval()
        self._mode = torch.inference_mode
        self._from_numpy = torch.from_numpy
        super().__init__(name, [_spec(*one) for one in zip(names, self.samples, strict=True)])
        given = self.run([array[:1] for array in self.samples])
        self.outputs = tuple(_spec(f"output_{n}", array) for n, array in enumerate(given))

    @classmethod
    def of_workload(
        cls, workload: Workload, keep_in: Path, threads: int = 1, seed: int = 0
    ) -> TorchRuntime:
        """The model that `workload` builds, here: for a process of its own.

        Raises:
            WorkloadError: the user's code fails, is a plain script, or has no model.
        """
        if workload.function is None:
            raise WorkloadError(
                f"{workload.name} is a script, and a model is meant",
                remedy=f"name a function that returns (model, batch): {workload.name}:make",
            )

        def keep(built: BuiltWorkload) -> Generator[None, Any, BuiltWorkload]:
            yield from ()
            return built

        built = drive(workload, keep, _stay, keep_in=keep_in, seed=seed)
        if built.model is None:
            raise WorkloadError(f"{workload.name} has a step, but no model that could serve")
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
        return [one.float().numpy() if _bf16(one) else one.numpy() for one in outputs]


class CallableRuntime(Runtime):
    """A function that takes arrays [N, ...] and returns one array [N, ...] or several.

    Args:
        function: called with as many arrays as samples have parts.
    """

    kind = "callable"

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        super().__init__(name)
        self._function = function

    def _run(self, inputs: Sequence[Array]) -> list[Array]:
        output = self._function(*inputs)
        if isinstance(output, (tuple, list)):
            return [np.asarray(one) for one in output]
        return [np.asarray(output)]


def function_at(target: str) -> Callable[..., Any]:
    """The function of ``file.py:function``, its file run as a module of its own.

    Raises:
        WorkloadError: no such file or function.
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
        raise WorkloadError(f"'{name}' is no function of this file", where=path)
    return function  # type: ignore[no-any-return]


def required_parameters(function: Callable[..., Any]) -> int:
    """How many positional arguments `function` must be given; of ``*args``, one."""
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(function).parameters.values()
    needed = sum(one.kind in positional and one.default is one.empty for one in parameters)
    return needed or int(any(one.kind is one.VAR_POSITIONAL for one in parameters))


def _values(fed: Any) -> Sequence[Any]:
    return list(fed.values()) if isinstance(fed, Mapping) else list(fed or ())


def _spec(name: str, array: Array) -> TensorSpec:
    return TensorSpec(name, array.dtype.name, (None, *array.shape[1:]))


def _bf16(tensor: Any) -> bool:
    return str(tensor.dtype) == "torch.bfloat16"


def _stay(result: Any) -> Any:
    raise AssertionError("only a script has to be left")
