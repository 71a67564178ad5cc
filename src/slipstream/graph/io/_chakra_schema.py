"""The messages of MLCommons Chakra execution traces, declared in Python.

Only messages used here, with the names and field numbers of the public schema
(``ChakraProtoMsg``, version 0.0.4 and later); protobuf retains undeclared fields, which are
ignored. Unlike generated code, these declarations do not depend on a version of protobuf's
compiler.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import (
    descriptor_pb2,
    descriptor_pool,
    message_factory,
)

_PACKAGE = "ChakraProtoMsg"
_FIELD = descriptor_pb2.FieldDescriptorProto

# Kinds of attribute values in the order of the schema: from field 3 on, each a scalar and a list.
_SCALARS = (
    "double", "float", "int32", "int64", "uint32", "uint64", "sint32", "sint64",
    "fixed32", "fixed64", "sfixed32", "sfixed64", "bool", "string", "bytes",
)  # fmt: skip
NODE_TYPES = (
    "INVALID_NODE", "METADATA_NODE", "MEM_LOAD_NODE", "MEM_STORE_NODE", "COMP_NODE",
    "COMM_SEND_NODE", "COMM_RECV_NODE", "COMM_COLL_NODE",
)  # fmt: skip


def _field(
    message: Any, name: str, number: int, kind: int, *, repeated: bool = False, of: str = ""
) -> Any:
    field = message.field.add()
    field.name, field.number, field.type = name, number, kind
    field.label = _FIELD.LABEL_REPEATED if repeated else _FIELD.LABEL_OPTIONAL
    if of:
        field.type_name = f".{_PACKAGE}.{of}"
    return field


def _attribute(file: Any) -> None:
    message = file.message_type.add()
    message.name = "AttributeProto"
    _field(message, "name", 1, _FIELD.TYPE_STRING)
    _field(message, "doc_string", 2, _FIELD.TYPE_STRING)
    message.oneof_decl.add().name = "value"
    number = 3
    for scalar in _SCALARS:
        kind = getattr(_FIELD, f"TYPE_{scalar.upper()}")
        items = file.message_type.add()
        items.name = f"{scalar.capitalize()}List"
        _field(items, "values", 1, kind, repeated=True)
        scalar_field = _field(message, f"{scalar}_val", number, kind)
        many = _field(message, f"{scalar}_list", number + 1, _FIELD.TYPE_MESSAGE, of=items.name)
        scalar_field.oneof_index = many.oneof_index = 0
        number += 2


def _declare() -> Any:
    file = descriptor_pb2.FileDescriptorProto()
    # A name of our own: another package may have registered the public file in its own pool.
    file.name, file.package, file.syntax = "slipstream/chakra.proto", _PACKAGE, "proto3"
    _attribute(file)
    metadata = file.message_type.add()
    metadata.name = "GlobalMetadata"
    _field(metadata, "version", 1, _FIELD.TYPE_STRING)
    _field(metadata, "attr", 2, _FIELD.TYPE_MESSAGE, repeated=True, of="AttributeProto")
    kinds = file.enum_type.add()
    kinds.name = "NodeType"
    for number, name in enumerate(NODE_TYPES):
        value = kinds.value.add()
        value.name, value.number = name, number
    sides = file.message_type.add()
    sides.name = "IOInfo"
    for number, name in enumerate(("values", "shapes", "types"), start=1):
        _field(sides, name, number, _FIELD.TYPE_STRING)
    node = file.message_type.add()
    node.name = "Node"
    _field(node, "id", 1, _FIELD.TYPE_UINT64)
    _field(node, "name", 2, _FIELD.TYPE_STRING)
    _field(node, "type", 3, _FIELD.TYPE_ENUM, of="NodeType")
    _field(node, "ctrl_deps", 4, _FIELD.TYPE_UINT64, repeated=True)
    _field(node, "data_deps", 5, _FIELD.TYPE_UINT64, repeated=True)
    _field(node, "start_time_micros", 6, _FIELD.TYPE_UINT64)
    _field(node, "duration_micros", 7, _FIELD.TYPE_UINT64)
    _field(node, "inputs", 8, _FIELD.TYPE_MESSAGE, of="IOInfo")
    _field(node, "outputs", 9, _FIELD.TYPE_MESSAGE, of="IOInfo")
    _field(node, "attr", 10, _FIELD.TYPE_MESSAGE, repeated=True, of="AttributeProto")
    return file


_POOL = descriptor_pool.DescriptorPool()
_POOL.Add(_declare())


def _message(name: str) -> Any:
    return message_factory.GetMessageClass(_POOL.FindMessageTypeByName(f"{_PACKAGE}.{name}"))


AttributeProto: Any = _message("AttributeProto")
GlobalMetadata: Any = _message("GlobalMetadata")
Node: Any = _message("Node")
