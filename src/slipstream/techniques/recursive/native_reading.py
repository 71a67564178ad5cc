"""Readers of a model's objects in compiled code, where it knows all their tests."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from slipstream.native.family import structure
from slipstream.techniques.recursive.reading import UnknownShapeError, by_test, one_word
from slipstream.techniques.recursive.structures import FAMILY, StructureError, Structures
from slipstream.techniques.recursive.traced import Access, Shape

_FUNCTIONS = {
    "get_attr": "PyObject_GetAttr", "get_item": "PySequence_GetItem",
    "call": "PyObject_CallNoArgs", "type_of": "PyObject_Type", "size": "PyObject_Size",
    "as_long": "PyLong_AsLong", "list_new": "PyList_New", "list_append": "PyList_Append",
    "release": "Py_DecRef", "error": "PyErr_Occurred", "clear": "PyErr_Clear",
}  # fmt: skip
_ACCESSES = {"attr": 1, "item": 2, "call": 3}
_OBJECT, _VALUE, _TYPE, _INTEGER = range(4)
_UNKNOWN, _ERROR = 19, 20
_MAX_REGISTERS = 60
_Python = structure(f"void* {', '.join([*_FUNCTIONS, 'none', 'yes', 'no', 'integer'])};")
_Arguments = structure(
    "void* python, code, keys, roots; int64_t root_count; void* nodes; int64_t count, edges; "
    "void* handle; int64_t bad_node;"
)


class _UnsupportedError(Exception):
    """Compiled code has no such test."""


def native_reader(shapes: Sequence[Shape]) -> Callable[[Sequence[Any]], Structures] | None:
    """Return a reader as `reading.reader` does; None if compiled code cannot read these shapes."""
    library = FAMILY.library
    if library is None or not shapes:
        return None
    code: list[int] = []
    keys: list[Any] = []
    try:
        _encode(shapes, list(range(len(shapes))), 0, code, keys)
    except _UnsupportedError:
        return None
    api: Any = ctypes.pythonapi
    functions = {
        name: ctypes.cast(getattr(api, symbol), ctypes.c_void_p).value
        for name, symbol in _FUNCTIONS.items()
    }
    python = _Python(**functions, none=id(None), yes=id(True), no=id(False), integer=id(int))
    codes = np.array(code, np.int32)
    addresses = np.array([id(key) for key in keys] or [0], np.uint64)
    # Unlike CDLL, it keeps the interpreter's lock.
    read = ctypes.PyDLL(library._name).slipstream_read
    read.argtypes, read.restype = [ctypes.c_void_p], ctypes.c_int32
    take = library.slipstream_read_take
    fixed = {
        "python": ctypes.addressof(python), "code": codes.ctypes.data,
        "keys": addresses.ctypes.data,
    }  # fmt: skip
    alive = (python, codes, addresses, keys)

    def structures(roots: Sequence[Any]) -> Structures:
        count = len(roots)
        firsts = (ctypes.py_object * count)(*roots)
        arguments = _Arguments(**fixed, roots=ctypes.addressof(firsts), root_count=count)
        status, error = 0, None
        try:
            status = read(ctypes.byref(arguments))
        except Exception as raised:
            error = raised
        nodes: list[Any] = []
        if arguments.nodes:
            nodes = ctypes.cast(arguments.nodes, ctypes.py_object).value
            ctypes.pythonapi.Py_DecRef(ctypes.py_object(nodes))
        if isinstance(error, (AttributeError, LookupError)):
            status = _UNKNOWN
        elif error is not None or status == _ERROR:
            raise StructureError(
                f"a node cannot be read as the model read it: {error}", arguments.bad_node
            ) from error
        if status == _UNKNOWN:
            raise UnknownShapeError(nodes[arguments.bad_node])
        if status:
            raise StructureError("there is not enough memory", -1)
        kind, word = np.empty((2, arguments.count), np.int32)
        offset, child = np.empty(arguments.count + 1, np.int64), np.empty(arguments.edges, np.int32)
        root_numbers = np.empty(count, np.int32)
        take(
            arguments.handle, kind.ctypes.data, word.ctypes.data, offset.ctypes.data,
            child.ctypes.data, root_numbers.ctypes.data,
        )  # fmt: skip
        assert alive
        return Structures(offset, child, word, root_numbers, kind, {}, nodes)

    return structures


def _encode(
    shapes: Sequence[Shape], chosen: list[int], depth: int, code: list[int], keys: list[Any]
) -> int:
    """Append the code that tells `chosen` shapes apart from `depth` on, and return its place."""
    first, place = shapes[chosen[0]], len(code)
    if not one_word(first) or depth > _MAX_REGISTERS:
        raise _UnsupportedError
    if len(first.observations) == depth:
        word = _register(first, first.words[0]) if first.words else -1
        children = [_register(first, access) for access in first.children]
        code += [-1, chosen[0], word, len(children), *children]
        return place
    access = first.observations[depth][0]
    if access:
        *parents, (how, key) = access
        if how == "test" or (how == "item" and not isinstance(key, int)):
            raise _UnsupportedError
        number = key if how == "item" else _key(keys, key)
        code += [_ACCESSES[how], _register(first, tuple(parents)), number, depth]
    else:
        code += [0, 0, 0, depth]
    groups = by_test(shapes, chosen, depth)
    code.append(len(groups))
    at = len(code)
    code += [0] * (4 * len(groups))
    for number, members in enumerate(groups):
        _, kind, value = shapes[members[0]].observations[depth]
        test = [*_test(kind, value, keys), _encode(shapes, members, depth + 1, code, keys)]
        code[at + 4 * number : at + 4 * number + 4] = test
    return place


def _test(kind: str, value: Any, keys: list[Any]) -> tuple[int, int, int]:
    if kind == "is" and (value is None or isinstance(value, bool)):
        return _OBJECT, _key(keys, value), 0
    if kind == "value" and abs(value) < 1 << 31:
        return _VALUE, value, 0
    if kind == "int":
        return _INTEGER, 0, 0
    if kind == "type":
        return _TYPE, _key(keys, value[0]), -1 if value[1] is None else value[1]
    raise _UnsupportedError


def _key(keys: list[Any], key: Any) -> int:
    keys.append(key)
    return len(keys) - 1


def _register(shape: Shape, access: Access) -> int:
    """Return the register of what was read; register 0 is the node."""
    if not access:
        return 0
    depths = [known for known, _, _ in shape.observations]
    if access not in depths:
        raise _UnsupportedError
    return depths.index(access)
