"""Distinct numbers for the storages of a recorded step.

Torch's execution trace names a storage by its address, and addresses of freed storages are reused:
two tensors that never lived at the same time may have one name, in one recording and not in the
next. Only tensors that no operator creates, as those of Python's numbers, may share a number.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from slipstream.capture.trace import Node


def number_storages(nodes: Sequence[Node]) -> None:
    """Replace the storages of `nodes` by numbers from 1, in the order of their first use.

    An output that lies in the storage of no input is a new tensor. The innermost operator that
    returns it as new created it.

    Args:
        nodes: those of a trace, in pre-order. Storages below 1 remain.
    """
    created = _created(nodes)
    numbers = _Numbers()
    inputs: list[tuple[int, ...]] = [()] * len(nodes)
    running: list[int] = []

    def end(i: int) -> None:
        """Number the outputs, which the operators inside it may have created."""
        node, call = nodes[i], nodes[i].call
        if call is None:
            return
        of_inputs = dict(zip(node.storages, inputs[i], strict=False))
        outputs = node.storages[len(inputs[i]) :]
        node.storages = inputs[i] + tuple(
            numbers.made(name, spec.dtype, of_inputs)
            for name, spec in zip(outputs, call.outputs, strict=True)
        )

    for i, node in enumerate(nodes):
        while running and running[-1] != node.parent:
            end(running.pop())
        running.append(i)
        if node.call is not None:
            read = zip(node.storages, node.call.inputs, strict=False)
            inputs[i] = tuple(numbers.read(name, spec.dtype) for name, spec in read)
        numbers.forget(created[i])
    while running:
        end(running.pop())


class _Numbers:
    """The numbers that names have now, with the types of the tensors in these storages."""

    def __init__(self) -> None:
        self._last = 0
        self._held: dict[int, tuple[int, set[str]]] = {}

    def forget(self, names: Iterable[int]) -> None:
        for name in names:
            self._held.pop(name, None)

    def read(self, name: int, dtype: str) -> int:
        """Return the number of an input; a new one if its storage held no such type."""
        if name in self._held and dtype not in self._held[name][1]:
            del self._held[name]
        return self.made(name, dtype, {})

    def made(self, name: int, dtype: str, inputs: dict[int, int]) -> int:
        """Return the number of an output; that of an input if it lies in its storage."""
        if name < 1:
            return name
        if name not in self._held:
            self._last += 1
            self._held[name] = self._last, set()
        number, dtypes = self._held[name]
        dtypes.add(dtype)
        return inputs.get(name, number)


def _created(nodes: Sequence[Node]) -> list[tuple[int, ...]]:
    """Return by operator the names of the storages that it creates itself."""
    created: list[tuple[int, ...]] = []
    inside: dict[int, set[int]] = {}
    for i in reversed(range(len(nodes))):
        node = nodes[i]
        count = len(node.call.inputs) if node.call is not None else 0
        new = set(node.storages[count:]).difference(node.storages[:count])
        theirs = inside.pop(i, set())
        created.append(tuple(new - theirs))
        if node.parent >= 0 and (theirs or new):
            inside.setdefault(node.parent, set()).update(theirs, new)
    return created[::-1]
