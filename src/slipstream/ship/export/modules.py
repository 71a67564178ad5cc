"""Export a PyTorch model from a user's file; its code runs only in a child process."""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.child import Child
from slipstream.errors import UsageError, WorkloadError
from slipstream.files import read_array
from slipstream.ship.export.noise import LayerNoise, layer_noise
from slipstream.ship.export.quantize import quantize_model
from slipstream.ship.firmware.writer import write_network

_EXPORT_S, _NOISE_INPUTS = 600, 32


def export_module(
    model: str, calibration: Path, *, weights: Path | None = None, observer: str = "percentile",
    with_noise: bool = True,
) -> tuple[bytes, tuple[LayerNoise, ...]]:  # fmt: skip
    """Return a .tflite file for a model in a user's file, and the noise int8 adds to its layers.

    Args:
        model: ``file.py:name`` of a class or function that returns a module without arguments.
        calibration: .npy, .npz or .pt with inputs of the model, [n, ...].
        weights: a state dict saved by ``torch.save``; None to keep the model's initial weights.
        observer: see `quantize_model`.
        with_noise: whether to measure the noise; it stays empty without LiteRT.

    Raises:
        UsageError: a file is missing or holds something else.
        WorkloadError: the user's code fails.
        UnsupportedModelError, InvalidArgumentError: see `quantize_model`.
    """
    path, _, name = model.rpartition(":")
    if not path.endswith(".py") or not Path(path).is_file() or not name.isidentifier():
        raise UsageError(f"'{model}' is not a model", remedy="pass model.py:Net or a .tflite file")
    for file in filter(None, (calibration, weights)):
        if not file.is_file():
            raise UsageError(f"file '{file}' not found")
    with tempfile.TemporaryDirectory() as folder, Child() as child:
        exported = Path(folder) / "model.tflite"
        noise = child.call(
            f"{__name__}:write_module", timeout_s=_EXPORT_S, path=str(Path(path).resolve()),
            name=name, calibration=str(calibration), weights=str(weights or ""),
            observer=observer, output=str(exported), with_noise=with_noise,
        )  # fmt: skip
        return exported.read_bytes(), tuple(LayerNoise(**layer) for layer in noise)


def write_module(
    path: str, name: str, calibration: str, weights: str, observer: str, output: str,
    with_noise: bool = True,
) -> list[dict[str, Any]]:  # fmt: skip
    """Do the work of `export_module` in the child process; arguments arrive as text."""
    model, inputs = load_model(path, name, calibration, weights)
    network = quantize_model(model, [inputs], name=name, observer=observer)
    content = write_network(network)
    Path(output).write_bytes(content)
    # Exporting needs torch only; measuring the noise of layers needs LiteRT.
    if not with_noise or importlib.util.find_spec("ai_edge_litert") is None:
        return []
    return [asdict(layer) for layer in layer_noise(model, content, inputs[:_NOISE_INPUTS])]


def load_model(path: str, name: str, calibration: str, weights: str) -> tuple[Any, Any]:
    """Run a user's file; return its model, and the calibration inputs [n, ...].

    Args:
        weights: file of a state dict; empty for the initial weights.
    """
    import torch

    sys.path.insert(0, str(Path(path).parent))
    stem = Path(path).stem
    module_name = stem if stem not in sys.modules else f"slipstream_model_{stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None and spec.loader is not None  # noqa: PT018 - the path ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    spec.loader.exec_module(module)
    make: Any = getattr(module, name, None)
    if not callable(make):
        raise WorkloadError(f"'{name}' is not a class or function", where=path)
    model = make() if not isinstance(make, torch.nn.Module) else make
    if not isinstance(model, torch.nn.Module):
        raise WorkloadError(
            f"{name}() returned a {type(model).__name__}", where=path,
            remedy="name a subclass of nn.Module, or a function that returns a module",
        )  # fmt: skip
    if weights:
        try:
            model.load_state_dict(torch.load(weights, map_location="cpu", weights_only=True))
        # Unpickling a file that is not a checkpoint can raise any exception.
        except Exception as error:
            raise UsageError(
                f"cannot load weights of {name}: {type(error).__name__}: "
                f"{str(error)[:300]}",
                where=weights, remedy=f"save them with torch.save(model.state_dict(), '{weights}')",
            ) from error  # fmt: skip
    return model, _inputs(Path(calibration))


def _inputs(path: Path) -> Any:
    """Read calibration inputs, float32 [n, ...]; an .npz has one array or ``x``."""
    import torch

    try:
        if path.suffix == ".pt":
            inputs = torch.load(path, map_location="cpu", weights_only=True)
        else:
            inputs = torch.from_numpy(np.asarray(read_array(path, UsageError), np.float32))
    except UsageError:
        raise
    except Exception as error:
        # torch and its unpickler raise a dozen kinds of exceptions for damaged files.
        raise UsageError(
            "cannot read calibration inputs",
            where=str(path),
            remedy="write inputs of the model, [n, ...], with np.save('calib.npy', inputs)",
        ) from error
    if not isinstance(inputs, torch.Tensor) or inputs.dim() < 2:
        raise UsageError("the file does not hold a tensor of inputs, [n, ...]", where=str(path))
    return inputs
