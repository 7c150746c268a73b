"""Reads dumps of PyTorch's flight recorder: the last collectives of a process, as a pickle or as JSON.

The format is that of ``FlightRecorder`` in torch/csrc/distributed/c10d, major version 2. A pickle can run any code, so
only the instructions that PyTorch writes for lists, dictionaries, text and numbers are carried out here.
"""

from __future__ import annotations

import pickle
import pickletools
import re
from collections.abc import Callable, Iterator
from itertools import islice
from math import prod
from pathlib import Path
from typing import Any

from ringtap.analysis.process_traces.process_trace import END_UNKNOWN, OperationReader, OperationTrace
from ringtap.core.errors import UsageError, file_errors
from ringtap.core.json_validation import COUNT, NS, Number, Shape, ShapeError, Text, check
from ringtap.core.large_json import members
from ringtap.core.untrusted_files import open_regular

MAX_BYTES = 64 << 20  # of a pickle
MAX_INSTRUCTIONS = 10_000_000  # of a pickle; each leaves at most an empty dictionary (64 bytes) and its place in a list
_MAX_VALUES = 10_000_000  # in the lists of all entries, which may be one list many times
_MAX_TEXT = 1000  # characters of a name, which may be that of all entries
_MAX_DIMENSIONS = 64  # of a tensor, as in PyTorch
# bytes of an element, by c10::toString
_ELEMENT_BYTES = (
    dict.fromkeys(("Byte", "Char", "Bool", "Float8_e5m2", "Float8_e4m3fn", "Float8_e5m2fnuz", "Float8_e4m3fnuz"), 1)
    | dict.fromkeys(("Short", "UInt16", "Half", "BFloat16"), 2)
    | dict.fromkeys(("Int", "UInt32", "Float", "ComplexHalf"), 4)
    | dict.fromkeys(("Long", "UInt64", "Double", "ComplexFloat"), 8)
    | {"ComplexDouble": 16}
)
_VERSION: Shape = Text(r"2\.\d+", "version 2 of the format")
_TIME: Shape = (NS, None)
_ENTRY: Shape = {
    "record_id": COUNT,
    "process_group": [str],
    "profiling_name": str,
    "collective_seq_id": COUNT,
    "p2p_seq_id": COUNT,
    "is_p2p": bool,
    "state": str,
    "retired": bool,
    "time_created_ns": NS,
    "time_discovered_started_ns?": _TIME,
    "time_discovered_completed_ns?": _TIME,
    "duration_ms?": (Number(0, 1e15), None),
    "input_sizes": [[COUNT]],
    "input_dtypes": [str],
    "output_sizes": [[COUNT]],
    "output_dtypes": [str],
}
# instructions of pickles that leave their argument, something new, or a tuple of the last values
_ARGUMENTS = {"BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE"}
_MADE: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_DICT": dict,
    "EMPTY_LIST": list,
    "EMPTY_TUPLE": list,
}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_RANK = re.compile(r"(\d+)(?:\.[A-Za-z]\w*)*$")


def read_flight_recorder(path: Path) -> OperationTrace:
    """Read a dump, whose rank is the number at the end of the file's name.

    A collective whose completion is not recorded has no end: one that had not completed ends with the dump's last time,
    and one whose end was not timed (gloo) has no length. Their names say so.

    Raises:
        UsageError: it cannot be read, is damaged, or has no collective or too many.
    """
    reader = OperationReader(path, "flight recorder")
    values = lost = 0
    try:
        for key, value in _members(path):
            if key == "version":
                check(value, _VERSION, key)
            elif key == "entries":
                tensors = value["input_sizes"] + value["output_sizes"]
                names = value["input_dtypes"] + value["output_dtypes"] + value["process_group"]
                dimensions = [len(tensor) for tensor in tensors]
                values += len(names) + len(tensors) + sum(dimensions)
                if max(dimensions, default=0) > _MAX_DIMENSIONS or values > _MAX_VALUES:
                    raise ShapeError("it has too many tensors or dimensions")
                if max(map(len, [*names, value["profiling_name"], value["state"]])) > _MAX_TEXT:
                    raise ShapeError(f"it has a name of more than {_MAX_TEXT:,} characters")
                check(value, _ENTRY)
                lost = lost if reader.operations else value["record_id"]
                _add(reader, value)
    except (ValueError, TypeError, AttributeError, LookupError) as error:
        where = f"{path}, entry {len(reader.operations) + 1}" if reader.operations else str(path)
        said = f"it has no {error}" if isinstance(error, KeyError) else error
        raise UsageError(
            f"{where} is not of a whole dump of PyTorch's flight recorder ({said}): dump it anew"
        ) from error
    if not reader.operations:
        raise UsageError(f"{path} has no collective: run the job with TORCH_FR_BUFFER_SIZE=2000, and dump it anew")
    left_out = (
        f"{path} has lost its first {lost:,} collectives: raise TORCH_FR_BUFFER_SIZE to keep more" if lost else ""
    )
    rank = _RANK.search(path.name)
    return reader.trace(int(rank[1]) if rank else None, left_out=left_out)


def _add(reader: OperationReader, entry: dict[str, Any]) -> None:
    begin_ns, end_ns, note = entry["time_created_ns"], entry.get("time_discovered_completed_ns") or None, ""
    if not end_ns and entry["retired"]:
        end_ns, note = begin_ns, END_UNKNOWN
    elif not end_ns:
        note = f"not completed ({entry['state']})"
    sent, received = (_bytes(entry[f"{end}_sizes"], entry[f"{end}_dtypes"]) for end in ("input", "output"))
    facts = {
        "state": entry["state"],
        "sequence": entry["p2p_seq_id" if entry["is_p2p"] else "collective_seq_id"],
        "types": ", ".join(dict.fromkeys(entry["input_dtypes"] + entry["output_dtypes"])) or None,
        "input_bytes": sent,
        "output_bytes": received,
        "duration_ms": entry.get("duration_ms"),
    }
    group = " ".join(["process group", *entry["process_group"]])
    reader.add((begin_ns, end_ns), (entry["profiling_name"], sent or received, note), group, facts)


def _bytes(sizes: list[list[int]], types: list[str]) -> int | None:
    """Return the bytes of tensors; None if there are none, or a type is not known."""
    if not sizes or len(sizes) != len(types) or not _ELEMENT_BYTES.keys() >= set(types):
        return None
    total = sum(_ELEMENT_BYTES[kind] * prod(shape) for shape, kind in zip(sizes, types, strict=True))
    return total if total < 2**62 else None


def _members(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the members of a dump, and each of its entries, as from `ringtap.core.large_json.members`."""
    with file_errors(path), open_regular(path) as file:
        data = file.read(1)
        if data == pickle.PROTO:
            data += file.read(MAX_BYTES)
    if data[:1] != pickle.PROTO:
        yield from members(path, "entries")
        return
    if len(data) > MAX_BYTES:
        raise ShapeError(f"it has more than {MAX_BYTES >> 20} MiB; a smaller TORCH_FR_BUFFER_SIZE has fewer")
    dump = _unpickled(data)
    check(dump, {"version": str, "entries?": [dict]})
    for key, value in dump.items():
        if key == "entries":
            yield from (("entries", entry) for entry in value)
        else:
            yield key, value


def _unpickled(data: bytes) -> Any:
    """Return the value of a pickle of plain data.

    Keys are text: the hash of a tuple nested deeply enough ends the process, and numbers can be chosen that share one
    hash. Tuples become lists.

    Raises:
        ValueError, TypeError, AttributeError, LookupError: it is damaged, or has something else.
    """
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[Any, Any] = {}
    for operation, argument, _ in islice(pickletools.genops(data), MAX_INSTRUCTIONS):
        name = operation.name
        if name in _ARGUMENTS:
            stack.append(argument)
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
        elif name in ("BINPUT", "LONG_BINPUT"):
            memo[argument] = stack[-1]
        elif name in _MADE:
            stack.append(_MADE[name]())
        elif name in _TUPLES:
            stack[-_TUPLES[name] :] = [stack[-_TUPLES[name] :]]
        elif name == "MARK":
            marks.append(len(stack))
        elif name in ("APPENDS", "SETITEMS"):
            at = marks.pop()
            items = stack[at:]
            del stack[at:]
            if name == "APPENDS":
                stack[-1].extend(items)
            else:
                stack[-1].update(zip(map(_key, items[::2]), items[1::2], strict=True))
        elif name == "STOP":
            return stack.pop()
        elif name != "PROTO":
            raise ShapeError(f"it has the instruction {name}, which PyTorch does not write")
    raise ShapeError(f"it has more than {MAX_INSTRUCTIONS:,} instructions; a smaller TORCH_FR_BUFFER_SIZE has fewer")


def _key(key: Any) -> str:
    if not isinstance(key, str):
        raise ShapeError("it has a key that is not text")
    return key
