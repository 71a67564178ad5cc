"""A plain script as a workload, whose steps are its optimizer steps or its calls of a model.

The script runs as ``__main__``, unchanged, or edited by techniques that change its loop: its file
is not modified. The first two optimizer steps reveal the models and optimizers; after that every
optimizer step resumes the program. When the program ends, the process ends immediately, so that
nothing the script would do later (saving a checkpoint, overwriting results) happens.

A script that calls a model and never runs a backward pass is inference: the calls of that model are
its steps. If this is known only when it ends, it runs again.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import linecache
import os
import re
import runpy
import stat
import sys
import traceback
import types
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator
from pathlib import Path
from textwrap import indent
from types import FrameType
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar

from slipstream.child import channel, describe_error
from slipstream.errors import WorkloadError
from slipstream.workload.built import (
    Applicable,
    BuiltWorkload,
    count_samples,
    prepare,
    seed_all,
    sort_by_stage,
)
from slipstream.workload.evaluations import Evaluations, evaluates
from slipstream.workload.lines import Line, UserLines, project_root
from slipstream.workload.loops import moved, other_loops
from slipstream.workload.packages import extend_path, import_place
from slipstream.workload.recipe import Workload, workload_functions

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
_STEPS_TO_DISCOVER = 2
# A script with fewer steps than this runs again if the program allows it.
_SHORT_SCRIPT = 500
# Words of a script that only runs a model, and of one that may train it (or of its imports).
_INFERS = re.compile(r"\b(inference_mode|no_grad)\b")
_TRAINS = re.compile(r"\b(backward|fit|optim\w*|[Tt]rain\w*)\b")
# Names of IPython in exported notebooks, and reads of standard input.
_OF_IPYTHON = ("get_ipython", "display")
_READS_INPUT = re.compile(r"\b(sys\.stdin|open\(0\b)")
# Calls of backward after which a script never steps an optimizer: without and with ``.step`` in its
# text, since gradients may be accumulated.
_MAX_BACKWARDS = (100, 1000)
# Lines and columns of a script's terminal, and the character that ends one read of it.
_TERMINAL, _END_OF_FILE, _MAX_READS = (24, 80), b"\4", 1000
# Exit status of argparse for wrong arguments.
ARGPARSE = 2
# Environment of ``torchrun --nproc-per-node 1``. Several processes run the script at a time: port 0
# is a free one.
_ONE_RANK = {
    "RANK": "0", "LOCAL_RANK": "0", "GROUP_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0",
}  # fmt: skip
_SHOWN_BYTES, _SHOWN_LINES, _SHOWN_FUNCTIONS = 4096, 5, 3
_WORKED_S = 0.5


class ScriptEndedError(WorkloadError):
    """The script ended, without an error, before the program had enough steps.

    Attributes:
        ended: how the script ended, and after how many steps.
        available: number of steps that the program could have had.
    """

    def __init__(self, ended: str, available: int, *, remedy: str) -> None:
        self.ended = ended
        self.available = available
        super().__init__(f"{ended}, which is not enough", remedy=remedy)


class ScriptRestarted(Exception):  # noqa: N818 (a signal, like GeneratorExit)
    """Thrown into a program at the step that the script's end interrupted."""


class _Discovery:
    """The models that optimizers train, or that are called, with the arguments of these calls.

    Args:
        adds_up: whether a step's loss is the sum over its ``backward`` calls, not only the last.
    """

    def __init__(self, adds_up: bool) -> None:
        self._adds_up = adds_up
        self.roots: dict[int, torch.nn.Module] = {}
        # Losses, and transforms of single images in a data set.
        self._transforms: set[int] = set()
        self._arguments: dict[int, tuple[tuple[Any, ...], dict[str, Any]]] = {}
        self._hooks: list[Any] = []
        self._depth = 0
        self._loss: Any = None
        self._calls: Counter[int] = Counter()
        self._loads: Counter[int] = Counter()
        self._largest: dict[int, tuple[int, int]] = {}
        self._open: dict[int, tuple[int, tuple[Any, ...], dict[str, Any]]] = {}
        self._next: Callable[[Any], Any] | None = None
        self.called: Callable[[torch.nn.Module, int], None] = lambda module, count: None
        self.after_backward: Callable[[], None] = lambda: None
        self.forwards = self.backwards = self.transformed = self._before = 0

    def __reduce__(self) -> tuple[Any, ...]:
        """Give copies and saved files of a module hooks of another, unused object."""
        return type(self), (False,)

    def before_forward(self, module: torch.nn.Module, inputs: Any) -> None:
        self._depth += 1
        if self._depth == 1 and id(module) not in self.roots:
            self.roots[id(module)] = module
            if not _has_state(module):
                self._transforms.add(id(module))
            self._arguments[id(module)] = inputs, {}
            # Only a module's own hook gets keyword arguments; it sees the second step.
            self._hooks.append(module.register_forward_pre_hook(self._take, with_kwargs=True))
        self.forwards += self._depth == 1 and id(module) not in self._transforms

    def _take(self, module: torch.nn.Module, inputs: Any, named: dict[str, Any]) -> None:
        import torch

        call = count_samples((*inputs, *named.values())), inputs, named
        self._open[id(module)] = call
        self._keep_call(module, int(torch.is_grad_enabled()), *call)

    def _keep_call(
        self, module: torch.nn.Module, use: int, samples: int, inputs: Any, named: dict[str, Any]
    ) -> None:
        """Keep the arguments of a step's largest call of a module.

        Args:
            use: 2 for a call that a backward pass reaches, which counts before all others; 1 for
                another with gradients, as of samples that are only saved; 0 as in a validation.
        """
        if (use, samples) >= self._largest.get(id(module), (0, 0)):
            self._largest[id(module)] = use, samples if use else 0
            self._arguments[id(module)] = inputs, named

    def after_forward(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        import torch
        from torch.utils._pytree import tree_leaves

        self._depth = max(0, self._depth - 1)
        call = self._open.pop(id(module), None)
        if torch._C._functorch.peek_interpreter_stack() is not None:
            self.transformed += 1
            return
        if call is not None:
            keep = functools.partial(self._keep_call, module, 2, *call)
            for tensor in tree_leaves(output):
                if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                    tensor.register_hook(lambda gradient: keep())
        if self._depth == 0 and id(module) not in self._transforms:
            self._calls[id(module)] += 1
            self.called(module, self._calls[id(module)])

    @property
    def most_calls(self) -> int:
        """Number of calls of the outermost module with weights that was called most often."""
        return max(self._calls.values(), default=0)

    @property
    def shares_weights(self) -> bool:
        """Whether a model's weights are in shared memory, where other processes train them."""
        return any(
            parameter.device.type == "cpu" and parameter.is_shared()
            for model in self.roots.values()
            for parameter in model.parameters()
        )

    def begin(self) -> None:
        """Start to watch a run of the script."""
        from torch.nn.modules import module

        self.after_backward = lambda: None
        self.roots.clear()
        self._transforms.clear()
        self._arguments.clear()
        self._calls.clear()
        self._depth = 0
        self._hooks = [
            module.register_module_forward_pre_hook(self.before_forward),
            module.register_module_forward_hook(self.after_forward, always_call=True),
        ]
        self._watch_loaders()

    def note_losses(self) -> None:
        """Record the tensors that ``backward`` is called on, since a script returns no loss."""
        import torch

        backward: Callable[..., Any] = torch.Tensor.backward

        @functools.wraps(backward)
        def noting(loss: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            before = self._loss if self._adds_up else None
            self._loss = loss if before is None else before.detach() + loss.detach()
            self.backwards += 1
            result = backward(loss, *args, **kwargs)
            self.after_backward()
            return result

        torch.Tensor.backward = noting  # type: ignore[method-assign, assignment]

    def take_loss(self) -> Any:
        """Return the step's loss, and forget it, so that its graph is not kept alive."""
        loss, self._loss = self._loss, None
        return loss

    def finish(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        if self._next is not None:
            _iterator().__next__, self._next = self._next, None

    def _watch_loaders(self) -> None:
        """Count the batches that each loader returns for training, until `finish`."""
        import torch

        self._next = original = _iterator().__next__
        loads = self._loads

        @functools.wraps(original)
        def counted(batches: Any) -> Any:
            batch = original(batches)
            loads[id(batches)] += torch.is_grad_enabled()
            return batch

        _iterator().__next__ = counted

    def stepped(self) -> None:
        """Start to count the calls and batches of the next step."""
        self._loads.clear()
        self._largest.clear()
        self._before = self.backwards

    @property
    def batches_per_step(self) -> int:
        """Batches with a backward pass since `stepped`; several if gradients are accumulated."""
        return max(1, min(max(self._loads.values(), default=1), self.backwards - self._before))

    def batch_of(self, module: torch.nn.Module | None) -> Any:
        """Return all arguments of the last call of `module`; None if it was not called.

        Returns:
            A dict if all are named, so that the model can be called with them.
        """
        if id(module) not in self._arguments:
            return None
        inputs, named = self._arguments[id(module)]
        return (*inputs, *named.values()) if inputs else dict(named)

    def call_of(self, module: torch.nn.Module) -> Callable[[], Any]:
        """Return a function that repeats the last call of `module`."""
        inputs, named = self._arguments[id(module)]
        return lambda: module(*inputs, **named)

    def model_of(self, optimizer: torch.optim.Optimizer) -> torch.nn.Module | None:
        """Return the outermost called module that owns most of the optimizer's parameters."""
        trained = {id(p) for group in optimizer.param_groups for p in group["params"]}

        def owned(module: torch.nn.Module) -> int:
            return sum(id(p) in trained for p in module.parameters())

        best = max(self.roots.values(), key=owned, default=None)
        return best if best is not None and owned(best) else None


def _has_state(module: torch.nn.Module) -> bool:
    """Whether a module has parameters, buffers or other weights, such as quantized ones."""
    return next(module.parameters(), None) is not None or bool(module.state_dict())


def run_script(
    workload: Workload,
    program: Callable[[BuiltWorkload], Generator[None, Any, T]],
    leave: Callable[[T], NoReturn],
    seed: int,
    *,
    repeats: bool = False,
) -> T:
    """Run the script at ``workload.path`` until `program` has its steps; never returns normally.

    Args:
        repeats: whether a short script runs again after its end, with `ScriptRestarted` thrown
            into `program` at the step that the end interrupted.

    Raises:
        WorkloadError: the script failed, or neither stepped an optimizer nor called a model.
        ScriptEndedError: it ended first.
    """
    return _Script(workload, program, leave, seed).run(repeats)


class _Script(Generic[T]):
    """A script, the program that its steps resume, and the state of both."""

    def __init__(
        self,
        workload: Workload,
        program: Callable[[BuiltWorkload], Generator[None, Any, T]],
        leave: Callable[[T], NoReturn],
        seed: int,
    ) -> None:
        self._workload = workload
        self._program = program
        self._leave = leave
        self._seed = seed
        self._path = workload.path.resolve()
        self._content = edit_script(workload, workload.techniques)
        # An edit changes the number of batches per step: the loss is the sum over them.
        self._discovery = _Discovery(adds_up=self._content is not None)
        self._lines = UserLines(project_root(self._path))
        self._evaluations = Evaluations()
        self._steps_of: dict[int, int] = {}
        self._around = workload.lines
        if self._content is not None:
            self._around = moved(self._around, self._path.read_bytes(), self._content)
        self._stepped_at: dict[Line, None] = {}
        self._optimizers: dict[int, torch.optim.Optimizer] = {}
        self._marked = False
        self._max_backwards = 0
        self._resumed: _Resumed | None = None
        self._built: BuiltWorkload | None = None

    def run(self, repeats: bool) -> T:
        """Run the script, several times if necessary."""
        from torch.optim.optimizer import register_optimizer_step_post_hook

        register_optimizer_step_post_hook(self._discover)
        self._evaluations.watch()
        self._discovery.note_losses()
        prepare(self._workload.techniques)
        extend_path(self._path)
        text = self._path.read_text(encoding="utf-8", errors="replace")
        self._max_backwards = _MAX_BACKWARDS[".step" in text]
        if _INFERS.search(text) and not _TRAINS.search(text):
            self._discovery.called = self._discover_call
        with self._lines:
            exit_ = self._run()
            if _ended_well(exit_) and self._infers:
                self._discovery.called = self._discover_call
                exit_ = self._run()
        turns = self._resumed.turns if self._resumed is not None else 0
        repeats = repeats and 1 < turns < _SHORT_SCRIPT
        while repeats and self._resumed is not None and _ended_well(exit_):
            turns = self._resumed.restart()
            exit_ = self._run()
            repeats = self._resumed.turns > turns
        missed = self._around and not self._steps_of and self._resumed is None
        if missed and self._stepped_at and _ended_well(exit_):
            at = " and ".join(map(str, self._stepped_at))
            raise WorkloadError(
                f"no step ran on line {self._workload.line} or in its loop",
                where=str(self._path),
                remedy=f"pass one of the lines where steps run: {at}",
            )
        raise _too_short(self._path, self._steps_of, self._discovery, exit_, self._resumed)

    def _run(self) -> SystemExit | None:
        """Run the script to its end, and watch for a model and an optimizer."""
        self._steps_of.clear()
        self._optimizers.clear()
        self._evaluations.after = lambda optimizer: None
        self._marked = False
        discovery = self._discovery
        discovery.begin()
        refuse = functools.partial(self._refuse_without_steps, discovery.backwards)
        discovery.after_backward = refuse
        try:
            exit_ = _run(self._workload, self._path, self._content, self._seed)
        finally:
            discovery.finish()
        return exit_

    @property
    def _infers(self) -> bool:
        """Whether the script only called a model, often enough for a program to start."""
        discovery = self._discovery
        trains = bool(self._steps_of) or bool(discovery.backwards) or discovery.shares_weights
        return not trains and not self._marked and discovery.most_calls > _STEPS_TO_DISCOVER

    def _refuse_without_steps(self, earlier: int) -> None:
        """End a script that updates its parameters without an optimizer.

        Args:
            earlier: calls of backward before this run of the script.
        """
        if not self._steps_of and self._discovery.backwards - earlier >= self._max_backwards:
            _leave_with(_never_stepped(self._path, "was stopped", self._discovery))

    def _discover(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        import torch

        if not self._marked and not self._is_meant(sys._getframe(1)):
            return
        # The optimizer that steps twice first marks the step; others belong inside it.
        self._steps_of[id(optimizer)] = self._steps_of.get(id(optimizer), 0) + 1
        self._optimizers[id(optimizer)] = optimizer
        if not self._marked and self._steps_of[id(optimizer)] == 1 == len(self._steps_of):
            self._discovery.stepped()
        if not self._marked and self._steps_of[id(optimizer)] == _STEPS_TO_DISCOVER:
            resumed = self._begin(self._discovery.model_of(optimizer), optimizer)
            take_loss = self._discovery.take_loss
            if evaluates(optimizer):
                self._evaluations.after = lambda stepped: (
                    resumed.resume(take_loss()) if stepped is optimizer else None
                )
                return
            if torch._C._current_graph_task_id() < 0:
                _resume_after_step(optimizer, take_loss, resumed)
                return
            # It steps in hooks of the backward pass, where a profiler can neither start nor stop.
            self._discovery.after_backward = lambda: resumed.resume(take_loss())

    def _discover_call(self, model: torch.nn.Module, count: int) -> None:
        if self._marked or not self._is_meant(sys._getframe(1)):
            return
        if count >= _STEPS_TO_DISCOVER:
            _resume_after_call(model, self._begin(model, None))

    def _is_meant(self, frame: FrameType) -> bool:
        """Whether the step from which `frame` was called is in the loop that the user named."""
        chain = self._lines.chain(frame)
        here = [line for line in chain if line.file == self._lines.shown(str(self._path))]
        for line in here[-1:]:
            self._stepped_at.pop(line, None)
            self._stepped_at[line] = None
        return not self._around or any(line.number in self._around for line in here)

    def _begin(
        self, model: torch.nn.Module | None, optimizer: torch.optim.Optimizer | None
    ) -> _Resumed:
        """Return the program, about to run over the discovered steps."""
        self._marked = True
        batches = self._discovery.batches_per_step
        self._discovery.finish()
        self._lines.__exit__()
        others = [each for each in self._optimizers.values() if each is not optimizer]
        at = next(reversed(self._stepped_at), None)
        elsewhere = other_loops(self._path, at.number) if at else []
        try:
            batch = self._discovery.batch_of(model)
            samples = count_samples(batch)
            built = BuiltWorkload(
                model,
                batch=batch,
                optimizer=optimizer,
                samples=samples,
                samples_before=samples,
                name=self._workload.name,
                from_script=True,
                other_optimizers=tuple(others),
                lines=self._lines,
                stepped_at=str(at) if at else "",
                other_loops=tuple(f"{at.file}:{number}" for number in elsewhere) if at else (),
                evaluations=evaluates(optimizer),
            )
            if model is not None and optimizer is None:
                built.step, built.from_parts = self._discovery.call_of(model), True
            with _copyable(model):
                for technique in sort_by_stage(self._workload.techniques):
                    technique.apply(built)
            if self._content is not None and built.samples_before:
                # The edited loop also accumulates the technique's batches.
                batches = max(batches * built.samples_before // built.samples, 1)
            built.samples *= batches
            built.samples_before *= batches
        except Exception as error:
            _leave_with(error)
        if self._resumed is None or self._built is None:
            self._built = built
            self._resumed = _Resumed(self._program(built), self._leave)
        else:
            # The program retains its workload.
            vars(self._built).update(vars(built))
        return self._resumed


@contextlib.contextmanager
def _copyable(model: torch.nn.Module | None) -> Iterator[None]:
    """Leave a ``forward`` that is assigned in the block out of copies and saved files of modules.

    It holds until the process ends, since the script copies and saves its model later.
    """
    import torch

    modules = () if model is None else tuple(model.modules())
    before = [vars(module).get("forward") for module in modules]
    yield
    after = [vars(module).get("forward") for module in modules]
    replaced = {
        module for module, old, new in zip(modules, before, after, strict=True) if new is not old
    }

    def state(module: torch.nn.Module) -> dict[str, Any]:
        attributes = vars(module).copy()
        if module in replaced:
            del attributes["forward"]
        return attributes

    if replaced:
        torch.nn.Module.__getstate__ = state  # type: ignore[method-assign]


def _ended_well(exit_: SystemExit | None) -> bool:
    return exit_ is None or not exit_.code


def _run(workload: Workload, path: Path, content: bytes | None, seed: int) -> SystemExit | None:
    """Run the script to its end; return its ``SystemExit``, or None without one."""
    seed_all(seed)
    leave_process_group()
    _attach_terminal()
    if os.environ.get("WORLD_SIZE") == "1":
        os.environ["MASTER_PORT"] = _ONE_RANK["MASTER_PORT"]
    sys.argv = [str(path), *workload.script_arguments]
    try:
        _, package = import_place(path)
        if content is None and not package:
            runpy.run_path(str(path), run_name="__main__")
        else:
            _run_content(path, content or path.read_bytes(), package)
    except SystemExit as exit_:
        return exit_
    except Exception as error:
        if _needs_launcher(error):
            os.environ.update(_ONE_RANK)
            return _run(workload, path, content, seed)
        remedy = _remedy(error, workload)
        if remedy is None:
            raise
        described = describe_error(error)
        raise WorkloadError(described["what"], where=described["where"], remedy=remedy) from error
    return None


def _attach_terminal() -> None:
    """Make standard input a terminal at its end of file.

    Scripts ask it for its size, for example with ``stty size``. ``input()`` raises `EOFError`.
    """
    if not os.isatty(0):
        with contextlib.suppress(OSError, ImportError):
            import termios

            ours, theirs = os.openpty()
            termios.tcsetwinsize(theirs, _TERMINAL)
            os.write(ours, _END_OF_FILE * _MAX_READS)
            os.dup2(theirs, 0)
            os.close(theirs)


def leave_process_group() -> None:
    """Let the user's code join a process group again: it may run several times."""
    from torch import distributed

    if distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


def _needs_launcher(error: Exception) -> bool:
    """Whether an error is due to a variable of `_ONE_RANK` that is not set."""
    message = str(error)
    named = isinstance(error, KeyError) or "environment variable" in message
    return named and any(
        name not in os.environ and name in re.findall(r"\w+", message) for name in _ONE_RANK
    )


def edit_script(workload: Workload, techniques: Iterable[Applicable]) -> bytes | None:
    """Return a plain script after the edits of `techniques`, in stage order.

    Returns:
        The file's bytes; None if no technique edits scripts.

    Raises:
        SlipstreamError: an edit cannot be placed.
    """
    editing = [technique for technique in techniques if technique.traits.edits_script]
    if not editing:
        return None
    content = original = workload.path.read_bytes()
    for technique in sort_by_stage(editing):
        lines = moved(workload.lines, original, content)
        content = technique.edit_script(workload.path, content, lines)
    return content


def _run_content(path: Path, content: bytes, package: str) -> None:
    """Run `content` as ``python file.py`` or ``python -m package.file`` would run the file."""
    text = importlib.util.decode_source(content)
    # For tracebacks, which show the lines that ran.
    linecache.cache[str(path)] = (len(text), None, text.splitlines(keepends=True), str(path))
    module = types.ModuleType("__main__")
    module.__file__, module.__package__ = str(path), package
    if package:
        importlib.import_module(package)
        # Processes that it spawns import it under this name.
        module.__spec__ = importlib.util.spec_from_file_location(f"{package}.{path.stem}", path)
    sys.modules["__main__"] = module
    exec(compile(content, str(path), "exec"), vars(module))


class _Resumed:
    """A program that the script's steps resume.

    Attributes:
        turns: number of times it was resumed; the first time only starts it.
    """

    def __init__(self, running: Generator[None, Any, T], leave: Callable[[T], NoReturn]) -> None:
        self._running = running
        self._leave = leave
        self._restarted = self._active = False
        self.turns = 0

    def restart(self) -> int:
        """Record that the script starts again; return the number of turns so far."""
        self._restarted = True
        return self.turns

    def resume(self, value: Any) -> None:
        """Resume the program after a step that returned `value`."""
        if self._active:  # the program itself calls the model
            return
        self._active = True
        try:
            self.turns += 1
            if self._restarted:
                self._restarted = False
                self._running.throw(ScriptRestarted())
            else:
                self._running.send(value if self.turns > 1 else None)
        except StopIteration as end:
            self._leave(end.value)
        except Exception as error:
            _leave_with(error)
        finally:
            self._active = False


def _iterator() -> Any:
    """Return the base class of both kinds of loader iterators, which defines ``__next__``."""
    import torch.utils.data.dataloader

    return torch.utils.data.dataloader._BaseDataLoaderIter


def _resume_after_step(
    optimizer: torch.optim.Optimizer, take_loss: Callable[[], Any], program: _Resumed
) -> None:
    """Resume the program at the end of each ``optimizer.step()`` of the script.

    The method is replaced, not hooked: torch calls hooks inside the annotation around the step, and
    the program must start and stop its recordings outside of it.
    """
    original = optimizer.step

    # With its attributes: learning rate schedulers read theirs.
    @functools.wraps(original)
    def step(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        program.resume(take_loss())
        return result

    optimizer.step = step  # type: ignore[method-assign]


def _resume_after_call(model: torch.nn.Module, program: _Resumed) -> None:
    """Resume the program at the end of each call of `model`.

    A subclass replaces hooks, which run inside the annotation of the module's forward pass.
    """
    original: Any = type(model)
    depth = 0

    def call(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        nonlocal depth
        depth += 1
        try:
            result = original.__call__(self, *args, **kwargs)
        finally:
            depth -= 1
        if self is model and depth == 0:
            program.resume(result)
        return result

    names = {"__call__": call, "__module__": original.__module__, "__doc__": original.__doc__}
    model.__class__ = type(original.__name__, (original,), names)


def _leave_with(error: Exception) -> NoReturn:
    """End the process with an error, which the script's handlers could catch if it were raised."""
    try:
        channel().send({"error": describe_error(error)})
    finally:
        os._exit(1)


def _remedy(error: Exception, workload: Workload) -> str | None:
    """Return the remedy for an error that is due to running the script here; None for others."""
    name = workload.path.name
    if isinstance(error, EOFError) and "reading a line" in str(error):
        return "a prompt cannot be answered here: pass its answer as an argument, after --"
    if isinstance(error, NameError) and error.name in _OF_IPYTHON:
        return f"only IPython defines '{error.name}': remove its lines from the exported notebook"
    line = traceback.extract_tb(error.__traceback__)[-1].line or ""
    if "argv" in line:
        arguments = " ".join(workload.script_arguments)
        return f"pass its arguments after --, for example {name} -- {arguments or 'ARGS'}"
    if _READS_INPUT.search(workload.path.read_text(encoding="utf-8", errors="replace")):
        return "standard input is empty here: if it needs some, let it read a file named after --"
    return None


def _too_short(
    path: Path,
    steps_of: dict[int, int],
    discovery: _Discovery,
    left: SystemExit | None,
    resumed: _Resumed | None,
) -> WorkloadError:
    """Return the error for a script without enough steps: it failed, trains nothing or is short."""
    name, steps = path.name, max(steps_of.values(), default=0)
    after = f"after {steps} optimizer step{'s' * (steps != 1)}"
    after = after if steps else "before any optimizer step"
    if left is not None and isinstance(left.code, str):
        return WorkloadError(
            f"{name} exited {after}: {left.code}", remedy="it does so without slipstream too"
        )
    if left is not None and left.code:
        output = _last_output()
        remedy = "run it alone; it exits there too"
        if left.code == ARGPARSE:
            remedy = f"pass its arguments after --, for example {name} -- ARGS"
            if sys.argv[1:]:
                remedy = "correct the arguments after --"
        return WorkloadError(
            f"{name} exited {after} with sys.exit({left.code})"
            + (f"; its last output was:\n{indent(output, '    ')}" if output else ""),
            remedy=remedy,
        )
    how = "ended" if left is None else "called sys.exit()"
    turns = resumed.turns if resumed is not None else 0
    if steps == 0 and resumed is None:
        return _never_stepped(path, how, discovery)
    if steps == 0:
        after = f"after {_calls(_STEPS_TO_DISCOVER + turns)} of its model"
    return ScriptEndedError(
        f"{name} {how} {after}",
        max(turns - 1, 0),
        remedy="let it run longer (more epochs or more data)",
    )


def _never_stepped(path: Path, how: str, discovery: _Discovery) -> WorkloadError:
    """Return the error for a script that ended without an optimizer step."""
    name, functions = path.name, workload_functions(path)[:_SHOWN_FUNCTIONS]
    named = " or ".join(f"{name}:{function}" for function in functions) or f"{name}:FUNCTION"
    advice = f"name a function that returns (model, batch, loss, optimizer): {named}"
    did, remedy = "", f"if an argument selects training, pass it after --; or {advice}"
    if discovery.backwards:
        did = f", after {_calls(discovery.backwards)} of backward"
        remedy = (
            "the steps of a script are counted by optimizer.step() of a torch.optim.Optimizer; "
            f"call that, or pass the argument that selects an optimizer after --, or {advice}, or "
            "one that returns a function that runs one step"
        )
    elif discovery.transformed:
        did = ", but called a model under a transform of torch.func"
        remedy = (
            "the steps of a script are counted by optimizer.step() of a torch.optim.Optimizer; "
            f"name a function that returns a function that runs one step: {named}"
        )
    elif discovery.forwards:
        did = f", after {_calls(discovery.forwards)} of a model"
        remedy = (
            f"for inference, name a function that returns (model, batch): {named}; "
            "if an argument selects training, pass it after --"
        )
    if _children_ran() and not discovery.backwards:
        did += f", {'and' if did else 'but'} started other processes"
        remedy = f"training in processes that the script starts is not observed; {advice}"
    output = _last_output() if "exit" in how else ""
    did += f"; its last output was:\n{indent(output, '    ')}" if output else ""
    return WorkloadError(f"{name} {how} without an optimizer step{did}", remedy=remedy)


def _calls(count: int) -> str:
    return f"{count} call{'s' * (count != 1)}"


def _children_ran() -> bool:
    """Whether ended processes that this one started used noticeable CPU time."""
    import resource

    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime > _WORKED_S


def _last_output() -> str:
    """Return the last lines that this process printed, if its output goes to a file."""
    sys.stdout.flush()
    sys.stderr.flush()
    status = os.fstat(2)
    if not stat.S_ISREG(status.st_mode):
        return ""
    text = os.pread(2, _SHOWN_BYTES, max(0, status.st_size - _SHOWN_BYTES))
    return "\n".join(text.decode(errors="replace").splitlines()[-_SHOWN_LINES:])
