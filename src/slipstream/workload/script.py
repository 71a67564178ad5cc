"""A plain training script as a workload: its optimizer steps are its steps.

The script runs as ``__main__``, unchanged. The first two optimizer steps tell which models and
optimizers there are; from then on every optimizer step resumes the program. When the program has
what it needs, the process ends at once, so that nothing the script would do later (saving a
checkpoint, overwriting results) happens. Files it opens for writing before that are kept aside for
the parent to put back (`FileGuard`).
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable, Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from slipstream.errors import WorkloadError
from slipstream.workload.built import Built
from slipstream.workload.guard import FileGuard
from slipstream.workload.recipe import Workload

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
_STEPS_TO_DISCOVER = 2


class _Discovery:
    """Which models the optimizers train, seen from what runs between two optimizer steps."""

    def __init__(self) -> None:
        self.roots: dict[int, torch.nn.Module] = {}
        self.batch: Any = None
        self._depth = 0

    def before_forward(self, module: torch.nn.Module, inputs: Any) -> None:
        self._depth += 1
        if self._depth == 1:
            self.roots[id(module)] = module
            self.batch = inputs

    def after_forward(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        self._depth = max(0, self._depth - 1)

    def model_of(self, optimizer: torch.optim.Optimizer) -> torch.nn.Module | None:
        """The outermost module called that owns the most of the optimizer's parameters."""
        trained = {id(p) for group in optimizer.param_groups for p in group["params"]}

        def owned(module: torch.nn.Module) -> int:
            return sum(id(p) in trained for p in module.parameters())

        best = max(self.roots.values(), key=owned, default=None)
        return best if best is not None and owned(best) else None


def run_script(
    workload: Workload,
    program: Callable[[Built], Generator[None, Any, T]],
    leave: Callable[[T], NoReturn],
    keep_in: Path,
    seed: int,
) -> T:
    """Run the script at ``workload.path`` until `program` has its steps; never returns normally.

    Raises:
        WorkloadError: the script ended first, or never stepped an optimizer.
    """
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook

    path = workload.path.resolve()
    discovery = _Discovery()
    hooks = [
        torch.nn.modules.module.register_module_forward_pre_hook(discovery.before_forward),
        torch.nn.modules.module.register_module_forward_hook(
            discovery.after_forward, always_call=True
        ),
    ]
    seen: dict[int, int] = {}
    found: list[torch.optim.Optimizer] = []

    def discover(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        # The optimizer that steps twice first marks the step; others belong inside it.
        seen[id(optimizer)] = seen.get(id(optimizer), 0) + 1
        if found or seen[id(optimizer)] < _STEPS_TO_DISCOVER:
            return
        found.append(optimizer)
        for hook in hooks:
            hook.remove()
        built = _discovered(workload, discovery, optimizer)
        for technique in sorted(workload.techniques, key=lambda technique: technique.stage):
            technique.apply(built)
        _resume_after_step(optimizer, program(built), leave)

    register_optimizer_step_post_hook(discover)
    torch.manual_seed(seed)
    sys.argv = [str(path), *workload.script_arguments]
    sys.path.insert(0, str(path.parent))
    try:
        with FileGuard(path.parent, keep_in):
            runpy.run_path(str(path), run_name="__main__")
    except SystemExit as exit_:
        raise _too_short(path.name, seen, f"called sys.exit({exit_.code!r})") from None
    raise _too_short(path.name, seen, "ended")


def _resume_after_step(
    optimizer: torch.optim.Optimizer,
    running: Generator[None, Any, T],
    leave: Callable[[T], NoReturn],
) -> None:
    """From now on each ``optimizer.step()`` of the script ends with one turn of the program.

    On the object, not as a hook: torch calls its hooks inside the annotation it puts around the
    step, and the program must begin and end its recordings outside of it.
    """
    original = optimizer.step

    def step(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        try:
            next(running)
        except StopIteration as end:
            leave(end.value)
        return result

    optimizer.step = step  # type: ignore[method-assign]


def _discovered(
    workload: Workload, discovery: _Discovery, optimizer: torch.optim.Optimizer
) -> Built:
    from slipstream.workload.built import _count_samples

    return Built(
        discovery.model_of(optimizer),
        batch=discovery.batch,
        optimizer=optimizer,
        samples=_count_samples(discovery.batch),
        name=workload.name,
    )


def _too_short(name: str, seen: dict[int, int], how: str) -> WorkloadError:
    steps = max(seen.values(), default=0)
    if steps == 0:
        return WorkloadError(
            f"{name} {how} without any optimizer step",
            remedy="for inference, give a function: file.py:function that returns (model, batch)",
        )
    return WorkloadError(
        f"{name} {how} after {steps} optimizer steps, before enough were seen",
        remedy="let it run longer (more epochs or data), or give fewer --steps",
    )
