"""The architectures that a model contains: widths, depths and kernels, derived from its trace."""

from __future__ import annotations

import fnmatch
import itertools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.fx import GraphModule, Node

from slipstream.arguments import as_integer
from slipstream.errors import InvalidArgumentError, WorkloadError
from slipstream.nas.coupling import INDICES, OUTPUT, Coupling, Labels, argument, couple
from slipstream.nas.trace import op_name, owner_of, shape_of, trace
from slipstream.search import Candidate, Categorical, Space
from slipstream.tables import Column, Table
from slipstream.units import with_article

# Fraction of units that the narrowest choice retains, and the maximum number of choices.
_MIN_WIDTH = 0.25
_MAX_CHOICES = 8


@dataclass(frozen=True)
class Width:
    """Channels or heads that are removed from all their parameters together.

    Attributes:
        path: qualified name of the layer that makes them.
        components: number of the component of each unit, int64 [units].
        block: maximum number of outputs of a layer that belong to one unit.
        choices: numbers of retained units, ascending; the last is the number of units.
        parameters: names of the parameters that shrink.
    """

    path: str
    components: Labels
    block: int
    choices: tuple[int, ...]
    parameters: tuple[str, ...]


@dataclass(frozen=True)
class Depth:
    """Residual blocks of one stage, of which the last ones can be skipped.

    Attributes:
        path: qualified name of the module that contains them.
        choices: numbers of retained blocks.
        blocks: per block its names, and the sums that are replaced by their shortcut operand.
    """

    path: str
    choices: tuple[int, ...]
    blocks: tuple[tuple[str, tuple[tuple[Node, Node], ...]], ...]


@dataclass(frozen=True)
class Kernel:
    """Convolutions at `path` with one weight whose odd kernel can be cropped to its centre."""

    path: str
    choices: tuple[int, ...]
    weight: str


@dataclass(frozen=True)
class ArchitectureSpace:
    """Architectures that are parts of one model.

    Attributes:
        module: the traced model; its parameters are copies of the model's.
        coupling: which positions are retained together.
        choices: widths, depths and kernels, by name.
        space: the same as a search space.
        reasons: why an axis of a parameter is not searchable, by parameter and axis.
    """

    module: GraphModule
    coupling: Coupling
    choices: Mapping[str, Width | Depth | Kernel]
    space: Space
    reasons: Mapping[tuple[str, int], str] = field(default_factory=dict)

    def __deepcopy__(self, memo: object) -> ArchitectureSpace:
        return self  # a copy of a supernet has its own weights, on the same space

    def __reduce__(self) -> str:
        raise WorkloadError(
            "an architecture space cannot be pickled",
            remedy="save the supernet's state_dict(), and load it after deriving the space again",
        )

    @property
    def full(self) -> dict[str, int]:
        """Configuration of the whole model."""
        return {name: choice.choices[-1] for name, choice in self.choices.items()}

    @property
    def smallest(self) -> dict[str, int]:
        """Configuration with the smallest choice of every parameter."""
        return {name: choice.choices[0] for name, choice in self.choices.items()}

    def checked(self, config: Mapping[str, Any] | Candidate) -> dict[str, int]:
        """Return a configuration with the largest choice for every name that it leaves out.

        Raises:
            InvalidArgumentError: a value is not one of its choices, or `config` is not a mapping.
            UnknownNameError: a name is not a parameter of the space.
        """
        values = config.values if isinstance(config, Candidate) else config
        if not isinstance(values, Mapping):
            raise InvalidArgumentError(
                "config", f"{with_article(type(values).__name__)} is not a mapping",
                remedy="pass values by name; {} is the whole model",
            )  # fmt: skip
        return dict(self.space.checked({**self.full, **values}))

    def sample(self, rng: np.random.Generator) -> dict[str, int]:
        """Draw a random configuration."""
        return dict(self.space.sample(rng).values)

    @property
    def coverage(self) -> float:
        """Fraction of positions of parameters' axes that can shrink.

        Axes that are outputs of the model or looked up by index are excluded.
        """
        searchable = excluded = 0
        for name, axes in self.coupling.parameters.items():
            for axis, labels in enumerate(axes):
                if labels is None:
                    continue
                why = self.reasons.get((name, axis))
                searchable += len(labels) if why is None else 0
                excluded += len(labels) if why and not _is_outside(why) else 0
        return searchable / max(1, searchable + excluded)

    def summary(self) -> tuple[Table, Table]:
        """Return a table of the choices, and one of what is not searchable with the reasons."""
        rows = []
        for name, choice in self.choices.items():
            kind = type(choice).__name__.lower()
            where = choice.parameters[0] if isinstance(choice, Width) else (
                choice.weight if isinstance(choice, Kernel) else choice.blocks[0][0])  # fmt: skip
            rows.append([name, kind, ", ".join(map(str, choice.choices)), where])
        size = sum(math.log10(len(choice.choices)) for choice in self.choices.values())
        first = Table(
            [Column("parameter"), Column("kind"), Column("choices"), Column("first at")], rows,
            notes=[f"10^{size:.1f} architectures; {self.coverage:.0%} of the channel dimensions "
                   "that the model's outputs do not fix are searchable"],
        )  # fmt: skip
        fixed = [[name, str(axis), why] for (name, axis), why in self.reasons.items()]
        second = Table([Column("not searchable"), Column("axis", "right"), Column("reason")], fixed)
        return first, second


def derive_space(
    model: nn.Module,
    inputs: torch.Tensor | Sequence[torch.Tensor],
    *,
    channel_multiple: int = 8,
    keep: Sequence[str] = (),
) -> ArchitectureSpace:
    """Derive the architectures that `model` contains from a trace of it.

    Groups of channels that residual sums, depthwise convolutions, concatenations, norms, views and
    attention heads connect become one width each. Residual blocks whose removal keeps all shapes
    become depths, convolutions with odd kernels of 5 or more become kernels.
    Follows ModularNAS (Lin et al., MLSys 2021) and once-for-all (Cai et al., ICLR 2020).

    Args:
        inputs: example tensors; dimension 0 is the batch.
        channel_multiple: widths are multiples of it where the layer is wide enough.
        keep: globs of names of parameters or modules that stay unchanged.

    Raises:
        InvalidArgumentError: nothing in the model is searchable (the error lists the reasons), or
            a glob of `keep` matches nothing.
        WorkloadError: the model cannot be traced.
    """
    examples = tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)
    multiple = as_integer("channel_multiple", channel_multiple)
    keep = (keep,) if isinstance(keep, str) else tuple(keep)
    module = trace(model, examples)
    coupling = couple(module)
    for glob in keep:
        if not any(_is_kept(name, (glob,)) for name in coupling.parameters):
            raise InvalidArgumentError(
                "keep", f"{glob!r} matches no parameter or module",
                remedy=f"for example {next(iter(coupling.parameters), '')}",
            )  # fmt: skip
    found, reasons = _widths(coupling, multiple, keep)
    choices: dict[str, Width | Depth | Kernel] = {}
    derived: list[Width | Depth | Kernel] = [*found, *_depths(module, keep)]
    for choice in (*derived, *_kernels(module, keep)):
        choices[_identifier(choice, choices)] = choice
    if not choices:
        text = "; ".join(sorted(set(reasons.values()))[:5])
        raise InvalidArgumentError(
            "model", "it has nothing to search" + (f": {text}" if text else ""),
            remedy="pass a model with hidden layers of at least two channels, or a smaller `keep`",
        )  # fmt: skip
    space = Space(
        {name: Categorical(choice.choices, ordered=True) for name, choice in choices.items()}
    )
    return ArchitectureSpace(module, coupling, choices, space, reasons)


def _is_kept(name: str, keep: Sequence[str]) -> bool:
    """Whether `keep` matches a parameter or module, or a module around it."""
    around = itertools.accumulate(name.split("."), "{}.{}".format)
    return any(fnmatch.fnmatchcase(path, str(glob)) for path in around for glob in keep)


def _is_outside(why: str) -> bool:
    return why.startswith((OUTPUT, INDICES))


def _identifier(choice: Width | Depth | Kernel, taken: Mapping[str, Any]) -> str:
    """Return an unused name for a choice, valid in rules of a search space."""
    path = "".join(c if c.isalnum() else "_" for c in choice.path or "model")
    base = f"{type(choice).__name__.lower()}_{path}"
    name, n = base, 2
    while name in taken:
        name, n = f"{base}_{n}", n + 1
    return name


def _widths(
    coupling: Coupling, multiple: int, keep: Sequence[str]
) -> tuple[list[Width], dict[tuple[str, int], str]]:
    of: dict[int, list[tuple[str, int]]] = defaultdict(list)
    block: dict[int, int] = defaultdict(lambda: 1)
    fixed: dict[int, str] = {number: freeze.why for number, freeze in coupling.reasons.items()}
    at = {n: freeze.where for n, freeze in coupling.reasons.items()}
    axes_of = [
        (name, axis, coupling.raw[labels])
        for name, axes in coupling.parameters.items()
        for axis, labels in enumerate(axes)
        if labels is not None
    ]
    for name, axis, numbers in axes_of:
        unique, counts = np.unique(numbers, return_counts=True)
        for number, count in zip(unique.tolist(), counts.tolist(), strict=True):
            of[number].append((name, axis))
            if axis == 0:
                block[number] = max(block[number], count)
            if _is_kept(name, keep):
                fixed[number], at[number] = "`keep` names it", name
    groups: dict[tuple[tuple[str, int], ...], list[int]] = defaultdict(list)
    for number, axes in of.items():
        if number not in fixed:
            groups[tuple(axes)].append(number)
    widths: list[Width] = []
    for places, numbers in groups.items():
        size = max(block[number] for number in numbers)
        options = _choices(len(numbers), size, multiple)
        if len(options) < 2:
            fixed |= dict.fromkeys(numbers, "it has a single unit")
            at |= dict.fromkeys(numbers, places[0][0])
            continue
        first = next((name for name, axis in places if axis == 0), places[0][0])
        path = first.rpartition(".")[0] or first
        names = tuple(dict.fromkeys(name for name, _ in places))
        widths.append(Width(path, np.array(numbers, np.int64), size, options, names))
    reasons = {}
    for name, axis, numbers in axes_of:
        bad = [n for n in np.unique(numbers).tolist() if n in fixed]
        if bad:
            reasons[name, axis] = f"{fixed[bad[0]]}, at {at[bad[0]]}"
    return widths, reasons


def _choices(units: int, block: int, multiple: int) -> tuple[int, ...]:
    step = max(1, multiple // block)
    while step > 1 and units < 2 * step:
        step //= 2
    low = max(1, math.ceil(units * _MIN_WIDTH / step) * step)
    options = [*range(low, units, step), units]
    if len(options) > _MAX_CHOICES:
        picked = np.linspace(0, len(options) - 1, _MAX_CHOICES).round().astype(int)
        options = [options[n] for n in picked]
    return tuple(options)


def _depths(module: GraphModule, keep: Sequence[str]) -> list[Depth]:
    blocks: dict[str, list[tuple[Node, Node]]] = defaultdict(list)
    closed: set[str] = set()
    for node in module.graph.nodes:
        if op_name(node) == "add" and len(node.all_input_nodes) == 2:
            block = _block_of(node)
            shortcut = _shortcut(node)
            if block and shortcut is not None and not _is_kept(block, keep):
                blocks[block].append((node, shortcut))
            elif block:
                closed.add(block)
    stages: dict[tuple[str, Any], list[str]] = defaultdict(list)
    for block, sums in blocks.items():
        if block not in closed:
            stage = block.rpartition(".")[0], shape_of(sums[0][0].meta["val"])
            stages[stage].append(block)
    children: dict[str, set[str]] = defaultdict(set)
    for node in module.graph.nodes:
        path = owner_of(node).split(".")
        for n in range(1, len(path)):
            children[".".join(path[:n])].add(path[n])
    depths = []
    for (container, _), names in stages.items():
        low = 1 if len(names) >= len(children[container]) else 0
        if low == len(names):
            continue
        rows = tuple((block, tuple(blocks[block])) for block in names)
        depths.append(Depth(container, tuple(range(low, len(names) + 1)), rows))
    return depths


def _block_of(node: Node) -> str:
    """Return the innermost module with a number for a name that runs `node`; empty for none."""
    path = owner_of(node).split(".")
    while path and not path[-1].isdigit():
        path.pop()
    return ".".join(path)


def _shortcut(node: Node) -> Node | None:
    """Return the operand of a sum that the other one is computed from, and nothing else reads."""
    first, second = node.args[:2]
    if not (isinstance(first, Node) and isinstance(second, Node)):
        return None
    if "val" not in first.meta or "val" not in second.meta:
        return None
    if first.meta["val"].shape != second.meta["val"].shape:
        return None
    for shortcut, result in ((first, second), (second, first)):
        branch = _between(shortcut, result)
        if branch and all(user in branch or user is node for b in branch for user in b.users):
            return shortcut
    return None


def _between(start: Node, end: Node) -> set[Node]:
    """Return the nodes that depend on `start` and that `end` depends on, with `end`."""
    order = {node: n for n, node in enumerate(start.graph.nodes)}
    above, stack = {end}, [end]
    while stack:
        for source in stack.pop().all_input_nodes:
            if order[source] > order[start] and source not in above:
                above.add(source)
                stack.append(source)
    below = {start}
    for node in sorted(above, key=order.__getitem__):
        if any(source in below for source in node.all_input_nodes):
            below.add(node)
    return below - {start} if end in below else set()


def _kernels(module: GraphModule, keep: Sequence[str]) -> list[Kernel]:
    uses: dict[str, list[tuple[Node, int]]] = defaultdict(list)
    for node in module.graph.nodes:
        if op_name(node) in ("conv1d", "conv2d", "conv3d"):
            weight: Any = node.args[1]
            uses[str(weight.target)].append((node, _cropable(module, node)))
    kernels = []
    for weight, found in uses.items():
        size = min(size for _, size in found)
        if size < 5 or _is_kept(weight, keep):
            continue
        kernels.append(Kernel(weight.rpartition(".")[0], tuple(range(3, size + 1, 2)), weight))
    return kernels


def _cropable(module: GraphModule, node: Node) -> int:
    """Return the size of a square odd kernel with centred padding; 0 for others."""
    weight: Any = node.args[1]
    tensor = attrgetter(str(weight.target))(module)
    sizes = set(tensor.shape[2:])
    padding, dilation = argument(node, 4), argument(node, 5)
    size = sizes.pop()
    if sizes or size % 2 == 0 or isinstance(padding, str):
        return 0
    per = len(tensor.shape) - 2
    centred = [d * (size - 1) // 2 for d in (list(dilation) * per)[:per]]
    return int(size) if (list(padding) * per)[:per] == centred else 0
