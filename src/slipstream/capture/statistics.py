"""What can be recorded besides the graph, on request, of the values that flow through a step.

It takes steps of its own, after those whose time was taken: looking at values costs time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Generator, Iterator
from typing import TYPE_CHECKING, Any

from slipstream.capture.compiling import compiled_already
from slipstream.capture.lookups import Lookups
from slipstream.capture.spectra import Gradients, matrices, spectrum
from slipstream.capture.zeros import Zeros
from slipstream.graph import Spectrum, Statistics

if TYPE_CHECKING:
    import torch

    from slipstream.workload import BuiltWorkload

STATISTICS = ("grads", "ids", "regions", "sparsity", "spectra")
"""What can be asked for; "regions" is recorded by `slipstream.capture.regions`."""
OF_VALUES = frozenset(STATISTICS) - {"regions"}
_MOST_STEPS, _FEWEST_STEPS = 8, 2
_LONGEST_S = 30.0


def record_statistics(
    built: BuiltWorkload, needs: Collection[str], step_ns: float, report: Callable[[str], None]
) -> Generator[None, Any, Statistics]:
    """A program (see `slipstream.workload.drive`) that looks at the values of a few steps.

    Args:
        needs: of `OF_VALUES`; others are left out.
        step_ns: what a step takes: fewer of long ones are looked at, at least two.
    """
    wanted = sorted(OF_VALUES.intersection(needs))
    affordable = int(_LONGEST_S * 1e9 / max(step_ns, 1.0))
    steps = max(min(_MOST_STEPS, affordable), _FEWEST_STEPS)
    model = built.model
    lookups = Lookups(model) if "ids" in wanted else None
    zeros = Zeros(model) if "sparsity" in wanted and model is not None else None
    gradients = Gradients(model, noise="grads" in wanted, spectra="spectra" in wanted)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_uncompiled(model))
        for one in (lookups, zeros, gradients):
            if one is not None:
                stack.enter_context(one)
        for number in range(steps):
            report(f"recording {', '.join(wanted)}: step {number + 1} of {steps}")
            gradients.last_step = number == steps - 1
            yield
            if lookups is not None:
                lookups.end_step()
    spectra: tuple[Spectrum, ...] = ()
    if "spectra" in wanted and model is not None:
        report("singular values")
        weights = [spectrum(name, parameter, "weight") for name, parameter in matrices(model)]
        spectra = (*(one for one in weights if one is not None), *gradients.spectra())
    parts: dict[str, Any] = {
        "grads": gradients.noise(),
        "ids": lookups.result() if lookups is not None else (),
        "sparsity": zeros.result(steps) if zeros is not None else (),
        "spectra": spectra,
    }
    return Statistics(
        recorded=tuple(wanted),
        steps=steps,
        same_batch=built.reads_batch,
        reasons={name: _why_nothing(name, built) for name in wanted if not parts[name]},
        **parts,
    )


def _why_nothing(name: str, built: BuiltWorkload) -> str:
    if name == "ids":
        return "the step looks up no embedding table"
    if name == "grads":
        return "no optimizer ran in the step, or no parameter had a gradient"
    if built.model is None:
        return "the step hides its model; return (model, batch, loss, optimizer)"
    return "no parameter of the model is a matrix" if name == "spectra" else "no module ran"


@contextlib.contextmanager
def _uncompiled(model: torch.nn.Module | None) -> Iterator[None]:
    """What is compiled runs operator by operator within: compiled functions have no modules."""
    import torch

    if model is None or not compiled_already(model):
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield
