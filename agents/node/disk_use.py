"""Measures the disk use of a node's recording: its size, its growth per hour, and its limit."""

from __future__ import annotations

import contextlib
import socket
import time
from collections import deque
from pathlib import Path
from typing import Any

from ringtap.agents.node.recording_settings import RunSettings
from ringtap.core.json_validation import ShapeError, load_json
from ringtap.core.run_directory import folder_bytes
from ringtap.core.run_directory_schema import PACKETS, PACKETS_JSON, PACKETS_RING
from ringtap.core.units import format_size, parse_duration_s

RATE_S = 60.0  # the growth is that of the last minute
_LOOKS_OVER = 3
_FILES_BYTES = 200_000  # node.json with its reserve, headers, logs of the agent
_PACKETS_BYTES = 2_000_000  # the file that is written, and the one before


def first_minute_bytes(settings: RunSettings) -> int:
    """Return the least size of the first minute, without sockets and packets, which depend on the job."""
    total = _FILES_BYTES
    if "nic" in settings.collectors:
        from ringtap.collectors.nic import record_bytes

        every = settings.options.get("nic", {}).get("every")
        every_s = parse_duration_s(every) if every else settings.every_s
        total += round(60 / every_s) * record_bytes(len(socket.if_nameindex()))
    return total + (_PACKETS_BYTES if "packets" in settings.collectors else 0)


def disk_words(facts: dict[str, Any]) -> str:
    """Return size and growth in words, ``1.2 GB on disk, 240 MB per hour``; empty before the growth is known."""
    if "bytes_per_hour" not in facts:
        return ""
    return f"{format_size(facts['bytes'])} on disk, {format_size(facts['bytes_per_hour'])} per hour"


class DiskUse:
    """The size of a node's folder over time.

    Args:
        folder: the folder.
        limit_bytes: size that it must not exceed; 0 for no limit.

    Attributes:
        facts: ``bytes``, and ``limit_bytes`` and ``bytes_per_hour`` where known, for node.json.
    """

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        self._folder, self._limit_bytes = folder, limit_bytes
        self._over = 0
        self._written: deque[tuple[float, int]] = deque()  # CLOCK_MONOTONIC, bytes written until then
        self.facts: dict[str, Any] = {"bytes": 0} | ({"limit_bytes": limit_bytes} if limit_bytes else {})

    @property
    def is_full(self) -> bool:
        """True if the limit was exceeded each time of late: no collector deletes files that it can spare."""
        return self._over >= _LOOKS_OVER

    def look(self) -> None:
        """Measure the folder.

        Packets that were deleted at the limit count as written, and those that are not decided yet do not.
        """
        now_s, size, deleted_bytes = time.monotonic(), folder_bytes(self._folder), 0
        if self._limit_bytes:
            with contextlib.suppress(OSError, ShapeError):
                deleted_bytes = load_json(self._folder / PACKETS_JSON, PACKETS).get("deleted_bytes") or 0
        written_bytes = size + deleted_bytes - folder_bytes(self._folder / PACKETS_RING)
        self._written.append((now_s, written_bytes))
        while len(self._written) > 1 and self._written[1][0] <= now_s - RATE_S:
            self._written.popleft()
        begin_s, before = self._written[0]
        self.facts["bytes"] = size
        self._over = self._over + 1 if 0 < self._limit_bytes < size else 0
        if now_s - begin_s >= RATE_S:
            self.facts["bytes_per_hour"] = max(0, round((written_bytes - before) * 3600 / (now_s - begin_s)))
