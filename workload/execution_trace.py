"""Reads and writes Chakra execution traces: the nodes of one rank, as length-prefixed protobuf messages.

The schema is that of MLCommons Chakra (et_def.proto). Only the fields that a trace needs are declared.
A file holds one GlobalMetadata and then a Node per message, each after its length as a varint.

Chakra's first reader of traces (src/feeder) knows data dependencies only, and that of ASTRA-sim since 2025
(src/feeder_v3) both kinds. So each dependency is written as a data dependency; those of control are named again.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

from ringtap.core.errors import UsageError, file_errors
from ringtap.core.installation import install_command

SCHEMA_VERSION = "0.0.4"
Value = bool | int | float | str | list[bool] | list[int] | list[str]


class NodeType(IntEnum):
    """Types of nodes."""

    METADATA = 1
    MEM_LOAD = 2
    MEM_STORE = 3
    COMP = 4
    COMM_SEND = 5
    COMM_RECV = 6
    COMM_COLL = 7


class Collective(IntEnum):
    """Kinds of collectives, the attribute ``comm_type``."""

    ALL_REDUCE = 0
    REDUCE = 1
    ALL_GATHER = 2
    GATHER = 3
    SCATTER = 4
    BROADCAST = 5
    ALL_TO_ALL = 6
    REDUCE_SCATTER = 7
    REDUCE_SCATTER_BLOCK = 8
    BARRIER = 9


@dataclass
class Node:
    """An operation of a rank: a computation, a collective, a send or a receive.

    Attributes:
        id: number within the trace.
        name: name of the operation.
        type: type of the node.
        control_deps: ids of the nodes that must end before it begins.
        data_deps: ids of other nodes that must end before it begins, because it needs their data.
        start_us: start in the recorded run.
        duration_us: duration, of computations.
        attributes: name -> value, for example ``comm_type``, ``comm_size`` (bytes), ``comm_src``, ``comm_dst``.
    """

    id: int
    name: str
    type: NodeType
    control_deps: list[int] = field(default_factory=list)
    data_deps: list[int] = field(default_factory=list)
    start_us: int = 0
    duration_us: int = 0
    attributes: dict[str, Value] = field(default_factory=dict)

    @property
    def deps(self) -> set[int]:
        """Ids of all nodes that it waits for."""
        return {*self.control_deps, *self.data_deps}


# (name, number, type, is repeated); types by their names in protobuf
_NODE = (
    ("id", 1, "UINT64", False), ("name", 2, "STRING", False), ("type", 3, "INT32", False),
    ("ctrl_deps", 4, "UINT64", True), ("data_deps", 5, "UINT64", True), ("start_time_micros", 6, "UINT64", False),
    ("duration_micros", 7, "UINT64", False), ("attr", 10, "Attribute", True),
)  # fmt: skip
_METADATA = (("version", 1, "STRING", False), ("attr", 2, "Attribute", True))
_SCALARS = {
    "double": (3, "DOUBLE"), "float": (5, "FLOAT"), "int32": (7, "INT32"), "int64": (9, "INT64"),
    "uint32": (11, "UINT32"), "uint64": (13, "UINT64"), "sint32": (15, "SINT32"), "sint64": (17, "SINT64"),
    "fixed32": (19, "FIXED32"), "fixed64": (21, "FIXED64"), "sfixed32": (23, "SFIXED32"),
    "sfixed64": (25, "SFIXED64"), "bool": (27, "BOOL"), "string": (29, "STRING"),
}  # fmt: skip
_LISTS = {"int32_list": (8, "INT32"), "int64_list": (10, "INT64"), "uint32_list": (12, "UINT32"),
          "uint64_list": (14, "UINT64"), "bool_list": (28, "BOOL"), "string_list": (30, "STRING")}  # fmt: skip
# types of the attributes that simulators read; others follow from their values
_KNOWN = {
    "is_cpu_op": "bool", "comm_type": "int64", "comm_size": "int64", "comm_src": "int32", "comm_dst": "int32",
    "comm_tag": "int32", "pg_name": "string", "num_ops": "int64", "tensor_size": "uint64",
}  # fmt: skip


@cache
def message_classes() -> tuple[Any, Any]:
    """Return the classes of the protobuf messages GlobalMetadata and Node, from a pool of their own."""
    try:
        from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
    except ImportError as error:
        raise UsageError(f"execution traces need protobuf: {install_command('workload')}") from error
    types = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="ringtap_et.proto", package="ringtap.et", syntax="proto3")

    def add(message: Any, name: str, number: int, kind: str, repeated: bool) -> Any:
        label = types.LABEL_REPEATED if repeated else types.LABEL_OPTIONAL
        item = message.field.add(name=name, number=number, label=label)
        if hasattr(types, f"TYPE_{kind}"):
            item.type = getattr(types, f"TYPE_{kind}")
        else:
            item.type, item.type_name = types.TYPE_MESSAGE, f".ringtap.et.{kind}"
        return item

    attribute = file.message_type.add(name="Attribute")
    add(attribute, "name", 1, "STRING", False)
    attribute.oneof_decl.add(name="value")
    for name, (number, kind) in _SCALARS.items():
        add(attribute, f"{name}_val", number, kind, False).oneof_index = 0
    for name, (number, kind) in _LISTS.items():
        title = f"{kind.capitalize()}List"
        if title not in [each.name for each in file.message_type]:
            add(file.message_type.add(name=title), "values", 1, kind, True)
        add(attribute, name, number, title, False).oneof_index = 0
    for title, fields in (("GlobalMetadata", _METADATA), ("Node", _NODE)):
        message = file.message_type.add(name=title)
        for each in fields:
            add(message, *each)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    metadata, node = (
        message_factory.GetMessageClass(pool.FindMessageTypeByName(f"ringtap.et.{title}"))
        for title in ("GlobalMetadata", "Node")
    )
    return metadata, node


def write_trace(nodes: Iterable[Node], path: Path) -> None:
    """Write a trace, which is complete or absent.

    Raises:
        UsageError: a number is too large for its type.
    """
    metadata, message = message_classes()
    part = path.with_name(f".{path.name}.part")
    with part.open("wb") as file:
        _write(file, metadata(version=SCHEMA_VERSION).SerializeToString())
        for node in nodes:
            item = message(
                id=node.id, name=node.name, type=int(node.type), ctrl_deps=node.control_deps,
                data_deps=sorted(node.deps), start_time_micros=node.start_us, duration_micros=node.duration_us,
            )  # fmt: skip
            for name, value in node.attributes.items():
                try:
                    _set(item.attr.add(name=name), _KNOWN.get(name) or _kind_of(value), value)
                except (ValueError, TypeError) as error:
                    raise UsageError(f"{path} node {node.id}: {name} {value!r} cannot be written: {error}") from error
            _write(file, item.SerializeToString())
    part.replace(path)


def _set(attribute: Any, kind: str, value: Value) -> None:
    if isinstance(value, list):
        getattr(attribute, kind).values.extend(value)
    else:
        setattr(attribute, f"{kind}_val", value)


def _kind_of(value: Value) -> str:
    if isinstance(value, list):
        kinds = ((bool, "bool"), (int, "int64"), (str, "string"))
        return next((f"{name}_list" for kind, name in kinds if all(isinstance(one, kind) for one in value)), "")
    for kind, name in ((bool, "bool"), (int, "int64"), (float, "double")):
        if isinstance(value, kind):
            return name
    return "string"


def _write(file: BinaryIO, data: bytes) -> None:
    length = len(data)
    while length > 127:
        file.write(bytes([length & 127 | 128]))
        length >>= 7
    file.write(bytes([length]) + data)


def read_trace(path: Path) -> Iterator[Node]:
    """Yield the nodes of a trace.

    Raises:
        UsageError: the file cannot be read, is cut short, or holds something that is not a node.
    """
    metadata, message = message_classes()
    from google.protobuf.message import DecodeError

    with file_errors(path), path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        kind: Any = metadata
        number = 0
        while (data := _read(file, size, path, number)) is not None:
            item = kind()
            try:
                item.ParseFromString(data)
            except DecodeError as error:
                raise UsageError(f"{path} is not an execution trace: message {number} is damaged") from error
            if kind is message:
                yield _node(item, path)
            kind, number = message, number + 1
    if number == 0:
        raise UsageError(f"{path} is empty: an execution trace begins with its metadata")


def _read(file: BinaryIO, size: int, path: Path, number: int) -> bytes | None:
    """Return the next message, None at the end of the file."""
    length = shift = 0
    while True:
        byte = file.read(1)
        if not byte and not shift:
            return None
        if not byte or shift > 28:
            raise UsageError(f"{path} is cut short or damaged at message {number}: write it again")
        length |= (byte[0] & 127) << shift
        shift += 7
        if byte[0] < 128:
            break
    if length > size - file.tell():
        raise UsageError(f"{path} is cut short: message {number} should have {length} bytes; write it again")
    return file.read(length)


def _node(item: Any, path: Path) -> Node:
    try:
        kind = NodeType(item.type)
    except ValueError as error:
        raise UsageError(
            f"{path} node {item.id}: type {item.type} is unknown; the types are 1 (metadata) to 7 (collective)"
        ) from error
    attributes: dict[str, Value] = {}
    for attribute in item.attr:
        which = attribute.WhichOneof("value")
        if which is not None:
            value = getattr(attribute, which)
            attributes[attribute.name] = list(value.values) if which.endswith("_list") else value
    control = set(item.ctrl_deps)
    return Node(
        item.id, item.name, kind, list(item.ctrl_deps), [dep for dep in item.data_deps if dep not in control],
        item.start_time_micros, item.duration_micros, attributes,
    )  # fmt: skip
