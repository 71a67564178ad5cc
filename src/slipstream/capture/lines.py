"""Find the user's line behind every operator of a step.

Torch's records have operators, not the Python code that calls them. One more step runs under a
`TorchDispatchMode`, which sees every operator with the Python stack; its operators are matched with
the recorded step by name and order. An operator of the backward pass belongs to the line of its
forward operator, which has the same autograd sequence number.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slipstream.capture.events import Dispatched, positions
from slipstream.capture.modules import ROOT, ModuleNames, module_classes
from slipstream.capture.trace import Node
from slipstream.capture.units import LOADING, Units
from slipstream.graph import StepPhase

if TYPE_CHECKING:
    from slipstream.workload import BuiltWorkload
    from slipstream.workload.lines import Chain, Line, UserLines

_ENGINE = "autograd::engine::evaluate_function: "
_OPTIMIZER = "(optimizer)"
_LOADER = os.path.join("torch", "utils", "data", "dataloader.py")


@dataclass(frozen=True)
class Seen:
    """Operators of one step in order, and the user's lines behind each."""

    names: tuple[str, ...]
    chains: tuple[Chain, ...]


class LineWatch(Dispatched):
    """Context manager that records the user's lines behind every operator with a kernel."""

    def __init__(self, lines: UserLines) -> None:
        self._lines = lines
        self._names: list[str] = []
        self._chains: list[Chain] = []

    @property
    def seen(self) -> Seen:
        """Operators recorded so far."""
        return Seen(tuple(self._names), tuple(self._chains))

    def _note(self, operator: Any, args: Sequence[Any]) -> None:
        schema = getattr(operator, "_schema", None)
        name = schema.name if schema is not None else str(operator)
        frame = sys._getframe(2)
        chain = self._lines.chain(frame)
        if _in_loader(frame):
            # Loading a batch is one task, whatever operators it runs.
            if self._names and self._names[-1] == LOADING and self._chains[-1] == chain:
                return
            name = LOADING
        self._names.append(name)
        self._chains.append(chain)


def _in_loader(frame: Any) -> bool:
    while frame is not None:
        code = frame.f_code
        if code.co_name == "__next__" and code.co_filename.endswith(_LOADER):
            return True
        frame = frame.f_back
    return False


def find_chains(
    trace: Sequence[Node], units: Units, seen: Seen, made: Mapping[str, Chain], returned: Chain
) -> list[Chain]:
    """Return the user's lines behind each unit, outermost first; empty if unknown.

    Args:
        made: The lines that created each module and optimizer, by name (see `makers`).
        returned: The line that returned a loss that no code of the user's calls.
    """
    makers = [
        _maker(module, phase, made, returned)
        for module, phase in zip(units.module, units.phase.tolist(), strict=True)
    ]
    watched = [
        chain or maker for chain, maker in zip(_aligned(trace, units, seen), makers, strict=True)
    ]
    by_sequence = _by_sequence(trace, units, watched)
    chains: list[Chain] = []
    gradient_of: dict[int, Chain] = {}
    for u, i in enumerate(units.nodes.tolist()):
        call, storages = trace[i].call, trace[i].storages
        inputs = len(call.inputs) if call is not None else 0
        if units.phase[u] != StepPhase.BACKWARD or _recomputed(trace, i):
            chains.append(watched[u])
            continue
        chain: Chain = ()
        if (sequence := int(units.sequence[u])) >= 0:
            chain = by_sequence.get(sequence, ())
        else:
            # Accumulating a parameter's gradient belongs to the line that computed it.
            chain = next((gradient_of[s] for s in storages[:inputs] if s in gradient_of), ())
        chain = chain or makers[u] or watched[u]
        for storage in set(storages[inputs:]).difference(storages[:inputs]):
            gradient_of[storage] = chain
        chains.append(chain)
    return chains


def _aligned(trace: Sequence[Node], units: Units, seen: Seen) -> list[Chain]:
    names = [_name(trace[i]) for i in units.nodes.tolist()]
    places = positions(names, seen.names).tolist()
    return [seen.chains[at] if at >= 0 else () for at in places]


def _name(node: Node) -> str:
    return LOADING if node.call is None else node.call.op.partition("(")[0].partition(".")[0]


def _by_sequence(trace: Sequence[Node], units: Units, watched: Sequence[Chain]) -> dict[int, Chain]:
    """Return the lines behind the creator of each autograd node, by sequence number.

    The creator is a watched operator, a caller of watched operators, or a
    ``torch.autograd.Function``, of which the line that applies it counts.
    """
    unit_of = {node: u for u, node in enumerate(units.nodes.tolist())}
    within: dict[int, Chain] = {}
    for node, u in unit_of.items():
        chain = watched[u]
        above = trace[node].parent
        while above >= 0 and above not in unit_of:
            within[above] = _common(within[above], chain) if above in within else chain
            above = trace[above].parent
    chains: dict[int, Chain] = {}
    for i, node in enumerate(trace):
        # The innermost operator with a number created the autograd node.
        if node.sequence < 0 or _is_backward(trace, i):
            continue
        direct = _own_unit(trace, i, unit_of, watched)
        chain = within.get(i, ()) if direct is None else direct
        if direct is None and node.call is None:
            chain = _applied(chain, node.name)
        if chain:
            chains[node.sequence] = chain
    return chains


def _is_backward(trace: Sequence[Node], i: int) -> bool:
    """Whether it is autograd's annotation of a backward operator, with its forward's number."""
    above = trace[i].parent
    return trace[i].call is None and above >= 0 and trace[above].name.startswith(_ENGINE)


def _own_unit(
    trace: Sequence[Node], i: int, unit_of: Mapping[int, int], watched: Sequence[Chain]
) -> Chain | None:
    """Return the lines of the unit that is or contains a node; None without one."""
    while i >= 0:
        if i in unit_of:
            return watched[unit_of[i]]
        i = trace[i].parent
    return None


def _applied(chain: Chain, function: str) -> Chain:
    """Return `chain` up to the line that applies the ``autograd.Function`` of this name."""
    for at, line in enumerate(chain):
        if line.function.endswith(f"{function}.forward"):
            return chain[:at]
    return chain


def _common(chain: Chain, other: Chain) -> Chain:
    """Return the common prefix of two chains; if either is empty, the other."""
    if not chain or not other:
        return chain or other
    same = 0
    while same < min(len(chain), len(other)) and chain[same] == other[same]:
        same += 1
    return chain[:same]


def _recomputed(trace: Sequence[Node], i: int) -> bool:
    """Whether an operator of the backward pass recomputes a part of the forward pass."""
    return trace[i].call is not None and trace[i].sequence >= 0


def _maker(module: str, phase: int, made: Mapping[str, Chain], returned: Chain) -> Chain:
    """Return the lines that created the module of an operator that no user code calls."""
    while module:
        if chain := made.get(module):
            return chain
        module = module.rpartition(".")[0]
    if phase == StepPhase.OPTIMIZER:
        return made.get(_OPTIMIZER, ())
    return returned if phase == StepPhase.FORWARD else ()


def makers(built: BuiltWorkload) -> dict[str, Chain]:
    """Return the lines that created each module, the loss and the optimizer, by name."""
    import torch

    lines = built.lines
    chains: dict[str, Chain] = {}
    if isinstance(built.loss, torch.nn.Module):
        chains[type(built.loss).__name__] = lines.made(built.loss)
    for name, module in built.model.named_modules() if built.model is not None else ():
        chains[f"{ROOT}.{name}" if name else ROOT] = lines.made(module)
    chains[_OPTIMIZER] = lines.made(built.optimizer)
    return {name: chain for name, chain in chains.items() if chain}


def describe_lines(built: BuiltWorkload, chains: Sequence[Chain]) -> dict[str, Any]:
    """Return metadata about the lines of tasks, see `slipstream.graph.views.lines`."""
    functions: dict[str, str] = {}
    callers: dict[str, list[list[str]]] = {}
    origins = makers(built)

    def note(line: Line) -> None:
        functions.setdefault(str(line), line.function)

    for chain in dict.fromkeys([*chains, *origins.values()]):
        for line in chain:
            note(line)
    for chain in dict.fromkeys(chains):
        if len(chain) > 1:
            above = [str(line) for line in reversed(chain[:-1])]
            stacks = callers.setdefault(str(chain[-1]), [])
            if above not in stacks:
                stacks.append(above)
    return {
        "functions": functions,
        "callers": callers,
        "made": {name: str(chain[-1]) for name, chain in origins.items() if name != _OPTIMIZER},
        "files": class_files(built),
    }


def class_files(built: BuiltWorkload) -> dict[str, str]:
    """Return the user's file that defines each module's class, by module, if there is one."""
    if built.model is None:
        return {}
    files = {
        name: built.lines.file_of(type(module))
        for name, module in zip(module_classes(built.model), built.model.modules(), strict=True)
    }
    return {name: file for name, file in files.items() if file}


def line_of_units(
    names: ModuleNames, units: Units, chains: Sequence[Chain] | None
) -> Callable[[int], str]:
    """Return a function that gives ``file:line`` of a unit, from its chain or its module."""

    def line(u: int) -> str:
        if chains is not None and chains[u]:
            return str(chains[u][-1])
        return names.line_of(units.module[u], int(units.phase[u]), units.scope[u])

    return line
