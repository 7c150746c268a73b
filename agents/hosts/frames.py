"""Frames between the controller and its servant on a host: a line of JSON, then the bytes that it announces.

Lines, because srun hands its step's output on line by line. Both parts have an upper length: a host that has been
broken into must not fill the controller's memory.
"""

from __future__ import annotations

import json
from typing import Any

PROTOCOL = 2
# what comes before it is noise: the words of a login shell's start-up files
MARKER = b"\0ringtap-host "
# both sides say something this often
BEAT_S = 3.0
# so long without a word and a host counts as lost
SILENT_S = 12.0
# so long without a word and a servant takes its controller for dead: it ends what it has started
ORPHAN_S = 30.0
CHUNK_BYTES = 1 << 18
# the longest line is a command's answer: 1 MiB of each of its outputs, of which JSON may make six times as much
ANSWER_BYTES = 1 << 20
_LONGEST_LINE = 16 << 20

NOISE = "it says other things than ringtap does"
Frame = tuple[dict[str, Any], bytes]


def pack(item: dict[str, Any], data: bytes = b"") -> bytes:
    """A frame as it goes over the wire."""
    if data:
        item = item | {"bytes": len(data)}
    return json.dumps(item, separators=(",", ":")).encode() + b"\n" + data


class Unpacker:
    """Takes in bytes as they come and gives out whole frames."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._item: dict[str, Any] | None = None

    def feed(self, piece: bytes) -> list[Frame]:
        """The frames that these bytes complete.

        Raises:
            ValueError: this is no frame.
        """
        self._data += piece
        found: list[Frame] = []
        while True:
            if self._item is None:
                end = self._data.find(b"\n")
                if (len(self._data) if end < 0 else end) > _LONGEST_LINE:
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
    """Read a line of JSON that holds an object.

    Raises:
        ValueError: it holds something else.
    """
    try:
        item: Any = json.loads(line.decode())
    except (ValueError, RecursionError):
        raise ValueError(NOISE) from None
    if not isinstance(item, dict):
        raise ValueError(NOISE)
    return item
