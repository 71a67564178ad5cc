"""Statistics of the values in a step, recorded on request in addition to the graph.

They use separate steps, after the timed ones, since inspecting values takes time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Generator, Iterator
from typing import TYPE_CHECKING, Any

from slipstream.capture.compiling import compiled_already
from slipstream.capture.lookups import Lookups
from slipstream.capture.masks import MaskRecorder
from slipstream.capture.spectra import Gradients, matrices, spectrum
from slipstream.capture.zeros import Zeros
from slipstream.graph import Spectrum, Statistics

if TYPE_CHECKING:
    import torch

    from slipstream.workload import BuiltWorkload

STATISTICS = ("grads", "ids", "regions", "sparsity", "spectra")
"""Names of the statistics; `slipstream.capture.regions` records "regions"."""
OF_VALUES = frozenset(STATISTICS) - {"regions"}
_MAX_STEPS, _MIN_STEPS = 8, 2
_MAX_S = 30.0


def record_statistics(
    built: BuiltWorkload, needs: Collection[str], step_ns: float, report: Callable[[str], None]
) -> Generator[None, Any, Statistics]:
    """Record the values of a few steps, as a program (see `slipstream.workload.drive`).

    Args:
        needs: Statistics to record; those not in `OF_VALUES` are ignored.
        step_ns: Time of a step; fewer long steps are recorded, but at least two.
    """
    requested = sorted(OF_VALUES.intersection(needs))
    affordable = int(_MAX_S * 1e9 / max(step_ns, 1.0))
    steps = max(min(_MAX_STEPS, affordable), _MIN_STEPS)
    model = built.model
    lookups = Lookups(model) if "ids" in requested else None
    zeros = Zeros(model) if "sparsity" in requested and model is not None else None
    masks = MaskRecorder(model) if zeros is not None and model is not None else None
    gradients = Gradients(model, noise="grads" in requested, spectra="spectra" in requested)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_uncompiled(model))
        for recorder in (lookups, zeros, masks, gradients):
            if recorder is not None:
                stack.enter_context(recorder)
        for number in range(steps):
            report(f"recording {', '.join(requested)}: step {number + 1} of {steps}")
            gradients.last_step = number == steps - 1
            if masks is not None:
                masks.active = number == steps - 1
            yield
            if lookups is not None:
                lookups.end_step()
    spectra: tuple[Spectrum, ...] = ()
    if "spectra" in requested and model is not None:
        report("singular values")
        weights = [spectrum(name, parameter, "weight") for name, parameter in matrices(model)]
        spectra = (*(found for found in weights if found is not None), *gradients.spectra())
    parts: dict[str, Any] = {
        "grads": gradients.noise(),
        "ids": lookups.result() if lookups is not None else (),
        "sparsity": zeros.result(steps) if zeros is not None else (),
        "spectra": spectra,
    }
    masks_of_step = masks.take() if masks is not None else ()
    return Statistics(
        recorded=tuple(requested),
        steps=steps,
        same_batch=built.reads_batch,
        reasons={name: _why_nothing(name, built) for name in requested if not parts[name]},
        masks=masks_of_step,
        **parts,
    )


def _why_nothing(name: str, built: BuiltWorkload) -> str:
    if name == "ids":
        return "the step uses no embedding table"
    if name == "grads":
        return "no optimizer ran in the step, or no parameter had a gradient"
    if built.model is None:
        return "the step hides its model; return (model, batch, loss, optimizer)"
    return "no parameter of the model is a matrix" if name == "spectra" else "no module ran"


@contextlib.contextmanager
def _uncompiled(model: torch.nn.Module | None) -> Iterator[None]:
    """Run compiled code eagerly in the body, since compiled functions have no modules."""
    import torch

    if model is None or not compiled_already(model):
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield
