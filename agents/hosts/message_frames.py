"""Packs and unpacks frames between controller and host worker: a line of JSON, then as many bytes as it announces.

The protocol uses lines because srun forwards the output of a step line by line. Both parts of a frame have a maximum
length, so that a compromised host cannot fill the controller's memory.
"""

from __future__ import annotations

import json
from typing import Any

PROTOCOL = 3
# begins the host worker's first line; output before it comes from the start-up files of a login shell
MARKER = b"\0ringtap-host "
# interval of the heartbeats of both sides
BEAT_S = 3.0
# a host that sends nothing for this long counts as lost
SILENT_S = 12.0
# a host worker that receives nothing for this long ends the commands that it has started
ORPHAN_S = 30.0
CHUNK_BYTES = 1 << 18
# the longest line is a command's answer: at most 1 MiB of each output, which JSON escapes may make six times as long
ANSWER_BYTES = 1 << 20
_MAX_LINE_BYTES = 16 << 20

NOISE = "it says other things than ringtap does"
Frame = tuple[dict[str, Any], bytes]


def pack(item: dict[str, Any], data: bytes = b"") -> bytes:
    """Encode a frame."""
    if data:
        item = item | {"bytes": len(data)}
    return json.dumps(item, separators=(",", ":")).encode() + b"\n" + data


class Unpacker:
    """Decoder that turns a stream of bytes into complete frames."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._item: dict[str, Any] | None = None

    def feed(self, piece: bytes) -> list[Frame]:
        """Add bytes and return the frames that they complete.

        Raises:
            ValueError: the bytes are not a valid frame.
        """
        self._data += piece
        found: list[Frame] = []
        while True:
            if self._item is None:
                end = self._data.find(b"\n")
                if (len(self._data) if end < 0 else end) > _MAX_LINE_BYTES:
                    raise ValueError(NOISE)
                if end < 0:
                    return found
                self._item = read_object(bytes(self._data[:end]))
                del self._data[: end + 1]
            size = self._item.get("bytes", 0)
            if type(size) is not int or not 0 <= size <= CHUNK_BYTES:
                raise ValueError(NOISE)
            if len(self._data) < size:
                return found
            found.append((self._item, bytes(self._data[:size])))
            del self._data[:size]
            self._item = None


def read_object(line: bytes) -> dict[str, Any]:
    """Parse a line of JSON that holds an object.

    Raises:
        ValueError: the line is not a JSON object.
    """
    try:
        item: Any = json.loads(line.decode())
    except (ValueError, RecursionError):
        raise ValueError(NOISE) from None
    if not isinstance(item, dict):
        raise ValueError(NOISE)
    return item
