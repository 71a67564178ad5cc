"""Switches of training frameworks that have a technique's effect, one table per framework."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from slipstream.source._names import nodes_in
from slipstream.source._optimizer import assigned_to, optimizers_in
from slipstream.source._places import Places
from slipstream.source._source import AlreadyAppliedError, EditLocationError, Source, is_same
from slipstream.source._trainers import Framework

# Methods of a Lightning module that are not steps, and modules that measure rather than compute.
_NO_STEPS = ("__init__", "forward", "setup", "configure_model", "configure_optimizers")
_MEASURES = re.compile(r"Loss$|^torchmetrics\.")
_SETTINGS = {
    Framework.HUGGING_FACE: "TrainingArguments",
    Framework.LIGHTNING: "Trainer",
    Framework.ACCELERATE: "Accelerator",
    Framework.FABRIC: "Fabric",
}


@dataclass(frozen=True)
class Switch:
    """Keyword arguments with which a framework has a technique's effect.

    In its texts ``{setting}`` represents the technique's setting of that name and ``{torch}`` the
    name by which the file imports torch.

    Attributes:
        technique: its spec, such as ``accumulation:{batches}``.
        values: the arguments, as source text; empty if the framework has no switch.
        unset: values of the first argument that may be replaced; empty if any value may be.
        excluded: arguments that exclude these and the value that turns each off, set if present.
        without_gpu: arguments to add on a machine without a GPU unless they are present.
        lines: what to write where the edit cannot be placed; by default the arguments.
        note: what the diff does not show; without arguments, the reason.
        applies: whether the entry is for this script.
        then: a further edit that the arguments need, or the whole edit if there are none; returns
            the same `Source` if it is already made.
    """

    technique: str
    values: Mapping[str, str] = field(default_factory=dict)
    unset: tuple[str, ...] = ()
    excluded: Mapping[str, str] = field(default_factory=dict)
    without_gpu: Mapping[str, str] = field(default_factory=dict)
    lines: str = ""
    note: str = ""
    applies: Callable[[Places], bool] = lambda where: True
    then: Callable[[Places, Source], Source] | None = None


@dataclass(frozen=True)
class FrameworkEdit:
    """A `Switch` with a technique's settings: the edit and its texts."""

    switch: Switch
    settings: Mapping[str, object]

    def __call__(self, where: Places) -> Source:
        """Set the switch.

        Raises:
            EditLocationError: the framework has none, or the call that takes it cannot be edited.
            AlreadyAppliedError: it is set.
        """
        training, source, switch = where.training, where.source, self.switch
        assert training is not None
        then = switch.then or _nothing_more
        if not switch.values:
            if switch.then is not None:
                return then(where, source)
            name = self._text(switch.technique, where)
            why = f", since {switch.note}" if switch.note else ""
            raise source.location_error(
                f"{training.framework} has no switch for {name}{why}", training.start
            )
        call = training.settings
        if call is None:
            origin = "the command line" if training.flag else "a call that cannot be determined"
            raise source.location_error(
                f"{training.framework} takes its settings from {origin}", training.start
            )
        present = {keyword.arg: keyword.value for keyword in call.keywords}
        values = self._filled(switch.values, where)
        first = next(iter(values))
        replaceable = (*switch.unset, values[first]) if switch.unset else ()
        if replaceable and first in present and not is_same(present[first], *replaceable):
            value = source.segment(present[first])
            raise source.location_error(f"{first}={value} is set already", present[first])
        values |= {name: value for name, value in switch.excluded.items() if name in present}
        if switch.without_gpu and not present.keys() & switch.without_gpu.keys() and not _has_gpu():
            source = source.with_import("torch")
            values |= self._filled(switch.without_gpu, where)
        try:
            edited = source.set_keywords(call, **values)
        except AlreadyAppliedError:
            edited = then(where, where.source)
            if edited is where.source:
                raise
            return edited
        return then(where, edited)

    def note(self, where: Places) -> str:
        """Return what the diff does not show."""
        return self._text(self.switch.note, where)

    def by_hand(self, where: Places) -> str:
        """Return the lines to write where the edit cannot be placed."""
        training, values = where.training, self._filled(self.switch.values, where)
        assert training is not None
        without_gpu = {} if _has_gpu() else self._filled(self.switch.without_gpu, where)
        if training.flag and values:
            plain = {name: text.strip('"') for name, text in values.items()}
            plain |= dict.fromkeys(without_gpu, "True")
            return " ".join(f"{training.flag}{name} {text}" for name, text in plain.items())
        if self.switch.lines:
            return self._text(self.switch.lines, where)
        values |= without_gpu
        call = training.settings
        function = where.source.segment(call.func) if call else _SETTINGS[training.framework]
        return f"{function}(..., {', '.join(f'{name}={text}' for name, text in values.items())})"

    def _filled(self, values: Mapping[str, str], where: Places) -> dict[str, str]:
        return {name: self._text(text, where) for name, text in values.items()}

    def _text(self, text: str, where: Places) -> str:
        return text.format(torch=where.torch, **self.settings)


def find_switch(
    where: Places, technique: str, settings: Mapping[str, object]
) -> FrameworkEdit | None:
    """Return the framework's own edit for a technique.

    Args:
        technique: its spec, such as ``accumulation:4``.
        settings: its settings by name.

    Returns:
        None for a script with its own loop, and if the edit of such a script fits here too.
    """
    training = where.training
    if training is None:
        return None
    for switch in _SWITCHES[training.framework]:
        named = switch.technique.partition(":")[0] == technique.partition(":")[0]
        if named and switch.technique.format(**settings) == technique and switch.applies(where):
            return FrameworkEdit(switch, settings)
    return None


def _nothing_more(where: Places, source: Source) -> Source:
    return source


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _makes_no_optimizer(where: Places) -> bool:
    try:
        return not optimizers_in(where.source)
    except EditLocationError:
        return True


def _has_library_model(where: Places) -> bool:
    """Whether the model is the framework's, as far as the file shows, rather than the file's."""
    try:
        bases = where.model_class.bases
    except EditLocationError:
        return True
    qualified = [where.source.names.qualified(base) or "" for base in bases]
    return any(name.startswith("transformers.") for name in qualified)


def _optimizes_manually(where: Places) -> bool:
    return "automatic_optimization" in where.source.names.attributes


def _accumulates(where: Places, source: Source) -> Source:
    """Put the loop's body under ``accelerator.accumulate(model)``, unless something is.

    Raises:
        EditLocationError: the loop cannot be seen, or clips the gradients of every batch.
        AlreadyAppliedError: the loop itself counts batches before an update.
    """
    names, training = where.source.names, where.training
    if "accumulate" in names.attributes:
        return source
    assert training is not None
    assert training.settings is not None
    step = where.step
    if (block := step.accumulation(names)) is not None:
        raise where.source.already_applied("the loop accumulates gradients", block)
    loop, function = step.for_loop(where.source), step.backward.func
    assert isinstance(function, ast.Attribute)
    receiver = function.value
    if names.identity(receiver) != assigned_to(names, training.settings):
        raise where.source.location_error(
            "backward is not a call of the Accelerator", step.backward
        )
    for call in nodes_in(ast.Call, loop):
        conditions = [above.test for above in names.ancestors(call) if isinstance(above, ast.If)]
        synchronized = any("sync_gradients" in where.source.segment(test) for test in conditions)
        if "clip_grad" in where.source.segment(call.func) and not synchronized:
            raise where.source.location_error("gradients are clipped at every batch", call)
    accelerator, model = where.source.segment(receiver), step.model_name(where.source)
    return source.wrap(loop.body[0], loop.body[-1], f"with {accelerator}.accumulate({model}):")


def _compiles(technique: str, arguments: str) -> Switch:
    """Return an edit with ``model.compile(...)``, which keeps the class the framework inspects."""

    def edit(where: Places, source: Source) -> Source:
        where = where.with_named_model()
        return where.after_model(f"{{model}}{_called_part(where)}.compile({arguments})")

    return Switch(technique, lines=f"model.compile({arguments})  # what the step calls", then=edit)


def _called_part(where: Places) -> str:
    """Return ``.net`` if the methods of a Lightning module call ``self.net``; empty for the whole.

    Raises:
        EditLocationError: they call several modules, or none that can be seen.
    """
    assert where.training is not None
    if where.training.framework is not Framework.LIGHTNING:
        return ""
    names, kind = where.source.names, where.model_class
    steps = [node for node in kind.body if getattr(node, "name", "forward") not in _NO_STEPS]
    parts = set()
    for call in nodes_in(ast.Call, *steps):
        name = where.source.segment(call.func)
        modules = [value for value in names.values(call.func) if isinstance(value, ast.Call)]
        measures = any(_MEASURES.search(names.qualified(value.func) or "") for value in modules)
        if name == "self" or (modules and name.startswith("self.") and not measures):
            parts.add(name.removeprefix("self"))
    if len(parts) != 1:
        calls = " and ".join(f"self{part}" for part in sorted(parts)) or "no module"
        raise where.source.location_error(f"{kind.name} calls {calls} in its steps", kind)
    return parts.pop()


_LARGER_BATCH = "it trains as a batch {batches} times as large: the learning rate has to follow"
_HUGGING_FACE = (
    Switch(
        "amp:bf16",
        {"bf16": "True"},
        excluded={"fp16": "False"},
        without_gpu={"use_cpu": "not {torch}.cuda.is_available()"},
        note="the loss is computed under autocast too; without a GPU, TrainingArguments accepts "
        "bf16 only with use_cpu",
    ),
    Switch(
        "fused_optimizer:fused",
        {"optim": '"adamw_torch_fused"'},
        unset=('"adamw_torch"',),
        lines='TrainingArguments(..., optim="adamw_torch_fused")  # for AdamW; for other classes\n'
        "Trainer(..., optimizers=({torch}.optim.SGD(model.parameters(), fused=True), None))",
        applies=_makes_no_optimizer,
    ),
    Switch(
        "fused_optimizer:foreach",
        lines="Trainer(..., "
        "optimizers=({torch}.optim.AdamW(model.parameters(), foreach=True), None))",
        applies=_makes_no_optimizer,
    ),
    Switch(
        "accumulation:{batches}",
        {"gradient_accumulation_steps": "{batches}"},
        unset=("1",),
        note=_LARGER_BATCH + ", and the numbers of steps in TrainingArguments count updates",
    ),
    Switch(
        "checkpointing",
        {"gradient_checkpointing": "True"},
        applies=_has_library_model,
    ),
    Switch("compile:default", {"torch_compile": "True"}),
    Switch(
        "compile:reduce_overhead",
        {"torch_compile": "True", "torch_compile_mode": '"reduce-overhead"'},
    ),
    Switch(
        "compile:max_autotune",
        {"torch_compile": "True", "torch_compile_mode": '"max-autotune"'},
    ),
    _compiles("fusion", 'backend="slipstream_fusion", dynamic=False'),
    Switch("tf32", {"tf32": "True"}),
    Switch(
        "dataloader:{workers}",
        {"dataloader_num_workers": "{workers}", "dataloader_persistent_workers": "True"},
        note="where processes are spawned (Windows, macOS, Python 3.14), the script has to train "
        "under `if __name__ == '__main__':`",
    ),
    Switch(
        "channels_last",
        lines="model = model.to(memory_format={torch}.channels_last)\n"
        "# in the data_collator given to Trainer:\n"
        'batch["pixel_values"] = batch["pixel_values"].to(memory_format={torch}.channels_last)',
    ),
)
_LIGHTNING = (
    Switch(
        "amp:bf16",
        {"precision": '"bf16-mixed"'},
        note="all of training_step runs under autocast, the loss included",
    ),
    Switch(
        "accumulation:{batches}",
        lines="self.manual_backward(loss / {batches})\nif (batch_idx + 1) % {batches} == 0:\n"
        "    optimizer.step()\n    optimizer.zero_grad()",
        note="the module optimizes manually",
        applies=_optimizes_manually,
    ),
    Switch(
        "accumulation:{batches}",
        {"accumulate_grad_batches": "{batches}"},
        unset=("1",),
        note=_LARGER_BATCH + ", and max_steps counts updates",
    ),
    _compiles("compile:default", ""),
    _compiles("compile:reduce_overhead", 'mode="reduce-overhead"'),
    _compiles("compile:max_autotune", 'mode="max-autotune"'),
    _compiles("fusion", 'backend="slipstream_fusion", dynamic=False'),
    Switch(
        "channels_last",
        lines="model = model.to(memory_format={torch}.channels_last)  # before trainer.fit\n"
        "x = x.to(memory_format={torch}.channels_last)  # first in training_step",
    ),
)
_WIDENED = "the model runs under autocast; its output is converted to float32 before the loss"
_FABRIC = (Switch("amp:bf16", {"precision": '"bf16-mixed"'}, note=_WIDENED),)
_ACCELERATE = (
    Switch(
        "amp:bf16",
        {"mixed_precision": '"bf16"'},
        note=_WIDENED,
    ),
    Switch(
        "accumulation:{batches}",
        {"gradient_accumulation_steps": "{batches}"},
        unset=("1",),
        lines="accelerator = Accelerator(..., gradient_accumulation_steps={batches})\n"
        "with accelerator.accumulate(model):  # around the body of the training loop\n"
        "    if accelerator.sync_gradients:  # around accelerator.clip_grad_norm_",
        note=_LARGER_BATCH,
        then=_accumulates,
    ),
)
_SWITCHES = {
    Framework.HUGGING_FACE: _HUGGING_FACE,
    Framework.LIGHTNING: _LIGHTNING,
    Framework.ACCELERATE: _ACCELERATE,
    Framework.FABRIC: _FABRIC,
}
