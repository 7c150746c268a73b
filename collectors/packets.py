"""Packets: tcpdump beside the job where CAP_NET_RAW allows it, or a ring in Python where tcpdump is missing."""

from __future__ import annotations

import contextlib
import glob
import os
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ringtap.collectors import packets_place as place
from ringtap.collectors import ring_filter, tcpdump
from ringtap.collectors.base import Check, Context
from ringtap.collectors.packets_tool import END_S, Tool
from ringtap.records import Field, RecordWriter
from ringtap.rundir import write_json

_LEAST_PERIOD_S = 1.0
_SNAP_BYTES = 128
_MOST_BYTES = 20_000_000_000
_FILE_BYTES = 1_000_000_000
# with tcpdump's own 2 MiB, bursts are lost
_BUFFER_BYTES = 64 << 20
# the capture ends when less than this is free: a tenth, or 1 GB on a large disk
_FREE_BYTES = 1_000_000_000
_FREE_SHARE = 0.1
_FLUSHES = (4, 99)  # tcpdump before 4.99 dies of SIGUSR2
_COUNTS = ("captured", "received_by_filter", "dropped_by_kernel", "dropped_by_interface")
_FIELDS = [Field("t_ns", "<i8", "ns", "time"), Field("mono_ns", "<i8", "ns", "time")]
_FIELDS += [Field(name, "<u8", "packets", "counter", 64) for name in _COUNTS]
_KILLED = f"killed: it did not end within {END_S:.0f} s; its file may hold more packets than its last counts"
_REMEDY = (
    "ask the site for CAP_NET_RAW (root, or 'setcap cap_net_raw+ep' on tcpdump), or go without: "
    "sockets and counters need no privilege"
)


class PacketsCollector:
    """Writes ``packets/<nic>-<n>.pcap``, ``packets/packets.json`` and ``packets/counts.rec`` (once a second).

    Options: ``interface``, ``filter``, ``snap_bytes``, ``tool`` (``tcpdump`` or ``ring``), ``buffer_bytes`` (in the
    kernel), ``file_bytes`` (begin another file after so many), ``files`` (keep the newest so many; all if not given),
    ``most_bytes`` (end when there are so many on disk).
    """

    name = "packets"
    slow = True

    def __init__(self, context: Context) -> None:
        options = context.options
        self._folder = context.folder / self.name
        self.every_s = max(context.every_s, _LEAST_PERIOD_S)
        self.interface = options.get("interface") or place.default_interface()
        self._filter = options.get("filter", "")
        self._snap_bytes = int(options.get("snap_bytes") or _SNAP_BYTES)
        self._keep = int(options.get("files") or 0)
        self._most_bytes = int(options.get("most_bytes") or _MOST_BYTES)
        self._file_bytes = int(options.get("file_bytes") or (_FILE_BYTES if self._keep else 0))
        self._buffer_bytes = int(options.get("buffer_bytes") or _BUFFER_BYTES)
        self._wanted_tool = options.get("tool", "")
        self._tool: Tool | None = None
        self._facts: dict[str, Any] = {}
        self._deleted = 0

    def _tcpdump(self) -> str:
        """Path of tcpdump where it is wanted and can work; empty: use the ring."""
        return "" if self._wanted_tool == "ring" or tcpdump.cannot_drop_root() else tcpdump.find()

    def check(self) -> Check:
        """Whether this user may capture on the interface, and with what."""
        path = self._tcpdump()
        for reason, remedy in self._obstacles(path):
            if reason:
                return Check("unavailable", reason, remedy)
        tool = "tcpdump" if path else "a ring in Python (tcpdump is not usable here)"
        if place.has_rdma():
            reason = f"{tool} on {self.interface}; RDMA traffic goes past it and is not seen"
            return Check("degraded", reason, "collect 'infiniband' for the RDMA traffic")
        return Check("ok", f"{tool} on {self.interface}")

    def _obstacles(self, path: str) -> Iterator[tuple[str, str]]:
        """What could stand in the way, each with its remedy; an empty reason where it does not."""
        yield "" if self.interface else "there is no interface that is up", "name one with --interface"
        found = place.exists(self.interface)
        yield "" if found else f"there is no interface {self.interface}", "name one that 'ip link' shows"
        refusal = tcpdump.refusal(path, self.interface) if path else self._ring_refusal()
        yield refusal and f"packets cannot be captured on {self.interface}: {refusal}", _REMEDY
        wrong = self._filter_error(path)
        yield wrong and f"the filter {self._filter!r} cannot be used: {wrong}", "see pcap-filter(7)"
        few = f"{self._snap_bytes} bytes of a packet do not hold its TCP header"
        yield few if self._snap_bytes < 64 else "", "keep 128 (--snap 128)"

    def _ring_refusal(self) -> str:
        if self.interface == "any":
            return "all interfaces at once need tcpdump"
        try:
            socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0).close()
        except OSError as error:
            return str(error.strerror)
        return ""

    def _filter_error(self, path: str) -> str:
        if not self._filter:
            return ""
        if path:
            return tcpdump.filter_error(path, self.interface, self._filter)
        try:
            ring_filter.compile_filter(self._filter, 1, self._snap_bytes)
        except ValueError as error:
            return str(error)
        return ""

    def start(self) -> None:
        """Begin to capture.

        Raises:
            OSError: the program does not start; the message holds its words.
        """
        path = self._tcpdump()
        self._folder.mkdir(parents=True, exist_ok=True)
        self._first = self._folder / f"{self.interface}-0.pcap"
        self._loopback = place.is_loopback(self.interface)
        self._can_flush = not path or tcpdump.version(path) >= _FLUSHES
        self._facts = {
            "tool": "tcpdump" if path else "ring",
            "interface": self.interface,
            "filter": self._filter,
            "snap_bytes": self._snap_bytes,
            "buffer_bytes": self._buffer_bytes,
            "file_bytes": self._file_bytes,
            "begin_ns": time.time_ns(),
            **place.facts(self.interface),
        }
        line = tcpdump.command(path, self._facts, self._first) if path else self._ring_command()
        about = {"collector": self.name, "source": self._facts["tool"], "every_s": self.every_s}
        self._log = RecordWriter(self._folder / "counts.rec", _FIELDS, about)
        tool = Tool(line)
        try:
            tool.start()
        except OSError:
            self._log.close()
            raise
        self._tool = tool
        self._record("")

    def _ring_command(self) -> list[str]:
        line = [sys.executable, "-m", "ringtap.collectors.ring", "--interface", self.interface]
        line += ["--write", str(self._first), "--snap-bytes", str(self._snap_bytes)]
        line += ["--ring-bytes", str(self._buffer_bytes), "--file-bytes", str(self._file_bytes)]
        return [*line, self._filter] if self._filter else line

    def sample(self) -> None:
        """Ask for the counts, have the file flushed, keep the disk from filling.

        Raises:
            OSError: the capture is over: its program died, or the disk or its limit is full.
        """
        if self._tool is None or self._facts.get("ended"):
            return
        self._tool.ask()
        if self._can_flush:
            self._tool.signal("USR2")
        self._rotate()
        full = self._full()
        if full:
            self._tool.stop()
        why = full or self._tool.ended
        self._record(f"early: {why}" if why else "")
        if why:
            raise OSError(0, f"the capture on {self.interface} ended early: {why}")

    def _files(self) -> list[Path]:
        """The capture files, oldest first."""
        found = []
        for path in self._folder.glob(f"{glob.escape(self.interface)}-*.pcap"):
            number = path.stem.rpartition("-")[2]
            if number.isdecimal():
                found.append((int(number), path))
        return [path for _, path in sorted(found)]

    def _rotate(self) -> None:
        """Give the files their names (tcpdump appends a number to the first one's) and delete the oldest."""
        for path in self._folder.glob(f"{glob.escape(self._first.name)}[0-9]*"):
            number = path.name.removeprefix(self._first.name)
            if number.isdecimal():
                path.rename(self._folder / f"{self.interface}-{number}.pcap")
        for path in self._files()[: -self._keep] if self._keep else []:
            path.unlink()
            self._deleted += 1

    def _full(self) -> str:
        """Why there is no room to go on; empty where there is."""
        used = sum(path.stat().st_size for path in self._files())
        if used >= self._most_bytes:
            return f"its files reached {used} of {self._most_bytes} bytes"
        disk = os.statvfs(self._folder)
        free = disk.f_bavail * disk.f_frsize
        if free < min(_FREE_BYTES, _FREE_SHARE * disk.f_blocks * disk.f_frsize):
            return f"only {free} bytes are free on its disk, which the job may need"
        return ""

    def _record(self, ended: str) -> None:
        """Append the counts, and write packets.json anew."""
        assert self._tool is not None
        counts = asdict(self._tool.counts)
        self._log.append(time.time_ns(), time.monotonic_ns(), *(counts[name] for name in _COUNTS))
        self._facts |= counts | {"ended": ended, "end_ns": time.time_ns(), "deleted_files": self._deleted}
        self._facts["files"] = [path.name for path in self._files()]
        write_json(self._folder / "packets.json", self._facts)

    def stop(self) -> dict[str, Any]:
        """Wait until what was received is written, end the program, note its last counts.

        Returns:
            The counts and ``ended``.
        """
        if self._tool is None:
            return {}
        try:
            if not self._facts.get("ended"):
                self._tool.settle(self._loopback)
                early = self._tool.ended
                ended = self._tool.stop()
                self._rotate()
                self._record(f"early: {early}" if early else "as asked" if ended else _KILLED)
        finally:
            self._tool.kill()
            with contextlib.suppress(OSError):
                self._log.close()
        return {name: self._facts.get(name, 0) for name in _COUNTS} | {"ended": self._facts.get("ended", "")}
