"""Records packets with CAP_NET_RAW: by tcpdump beside the job, or a ring in Python where tcpdump is not usable."""

from __future__ import annotations

import contextlib
import glob
import os
import re
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

from ringtap.collectors import capture_program, python_capture
from ringtap.collectors.capture_program import END_S, Tool
from ringtap.collectors.collector_interface import Check, Context
from ringtap.collectors.ethtool_ioctl import offloads
from ringtap.collectors.infiniband import DEVICES
from ringtap.collectors.packets_around_slow_iterations import PacketWindows
from ringtap.collectors.slow_iterations import SlowIterations, parse_rule
from ringtap.core.append_only_logs import Field, RecordWriter
from ringtap.core.capture_file_formats import LINK_ETHERNET
from ringtap.core.isolated_python import python_command
from ringtap.core.run_directory import folder_bytes, write_json
from ringtap.core.run_directory_schema import PACKETS_RING, TIME_FIELDS

ROUTES = Path("/proc/net/route")
ROUTES6 = Path("/proc/net/ipv6_route")
_ANYWHERE6 = "00000000000000000000000000000000 00"


def _default_route() -> str:
    try:
        for line in ROUTES.read_text().splitlines()[1:]:
            columns = line.split()
            if columns[1] == columns[7] == "00000000":
                return columns[0]
        for line in ROUTES6.read_text().splitlines():
            if line.startswith(_ANYWHERE6) and not line.endswith(" lo"):
                return line.split()[-1]
    except OSError:
        pass
    return ""


def _is_loopback(stats: Any) -> bool:
    return "loopback" in stats.flags.split(",")


def exists(name: str) -> bool:
    """True if there is an interface of this name; ``any`` stands for all interfaces."""
    return name == "any" or name in psutil.net_if_stats()


def is_loopback(name: str) -> bool:
    """True if this is the loopback interface."""
    stats = psutil.net_if_stats().get(name)
    return stats is not None and _is_loopback(stats)


def default_interface() -> str:
    """Return the interface that the training most likely uses; empty if there is none.

    In this order: the one that ``GLOO_SOCKET_IFNAME`` or ``NCCL_SOCKET_IFNAME`` names; the one with the default route;
    the first that is up and is not loopback.
    """
    there = psutil.net_if_stats()
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        for word in os.environ.get(variable, "").split(","):
            if word.strip().lstrip("=") in there:
                return word.strip().lstrip("=")
    route = _default_route()
    if route in there:
        return route
    return next((name for name, stats in sorted(there.items()) if stats.isup and not _is_loopback(stats)), "")


def facts(name: str) -> dict[str, Any]:
    """Return MTU and offloads of an interface; with segmentation offloads a captured packet is many on the wire."""
    stats = psutil.net_if_stats().get(name)
    return {"mtu": stats.mtu if stats else None, "offloads": offloads(name)}


_ONLY = ("packets.json", "counts.rec")
_MIN_PERIOD_S = 1.0
SNAP_BYTES = 128
_MAX_BYTES = 20_000_000_000
_FILE_BYTES = 1_000_000_000
_RING_FILE_BYTES = 8_000_000  # around slow iterations: what is decided at once
_MIN_FILE_BYTES = 1_000_000  # of tcpdump
# with a disk limit: number of files in it, and its share that is left for what is written until the next look
_FILES_IN_LIMIT = 20
_SPARE_SHARE = 0.05
# with tcpdump's own 2 MiB, bursts are lost
_BUFFER_BYTES = 64 << 20
# the capture ends when less than this is free: a tenth of the disk, at most 1 GB
_FREE_BYTES = 1_000_000_000
_FREE_SHARE = 0.1
_FLUSHES = (4, 99)  # tcpdump before 4.99 dies of SIGUSR2
_COUNTS = ("captured", "received_by_filter", "dropped_by_kernel", "dropped_by_interface")
_FIELDS = list(TIME_FIELDS)
_FIELDS += [Field(name, "<u8", "packets", "counter", 64) for name in _COUNTS]
_KILLED = f"killed: it did not end within {END_S:.0f} s; its file may hold more packets than its last counts"
_REMEDY = (
    "ask the site for CAP_NET_RAW (root, or 'setcap cap_net_raw+ep' on tcpdump), or go without: "
    "sockets and counters need no privilege"
)


class PacketsCollector:
    """Recorder of ``packets/<nic>-<n>.pcap``, ``packets/packets.json`` and ``packets/counts.rec`` (once a second).

    With ``around_slow``, only packets around slow iterations are kept, and ``packets/<nic>-windows.jsonl`` says why.
    With a disk limit, the oldest files are deleted.

    Options: ``interface``, ``filter``, ``snap_bytes``, ``tool`` (``tcpdump`` or ``ring``), ``buffer_bytes`` (in the
    kernel), ``file_bytes`` (size after which another file begins), ``files`` (number of the newest files to keep; all
    if not given), ``most_bytes`` (size on disk at which the capture ends), ``part`` (name of one of several captures on
    the node, whose files are then ``<part>-<nic>-<n>.pcap``, ``<part>-<nic>.json`` and ``<part>-<nic>.rec``),
    ``around_slow`` (a rule of `ringtap.collectors.slow_iterations`).
    """

    name = "packets"
    slow = True

    def __init__(self, context: Context) -> None:
        options = context.options
        self._folder = context.folder / self.name
        self.every_s = max(context.every_s, _MIN_PERIOD_S)
        self.interface = options.get("interface") or default_interface()
        part = options.get("part", "")
        self._stem = f"{part}-{self.interface}" if part else self.interface
        self._json, self._counts = (f"{self._stem}.json", f"{self._stem}.rec") if part else _ONLY
        self._filter = options.get("filter", "")
        self._snap_bytes = int(options.get("snap_bytes") or SNAP_BYTES)
        self._keep = int(options.get("files") or 0)
        self._most_bytes = int(options.get("most_bytes") or _MAX_BYTES)
        self._limit_bytes = context.disk_limit_bytes
        self._rule = parse_rule(options["around_slow"]) if options.get("around_slow") else None
        self._ring = context.folder / PACKETS_RING if self._rule else self._folder
        self._file_bytes = int(options.get("file_bytes") or self._usual_file_bytes())
        self._buffer_bytes = int(options.get("buffer_bytes") or _BUFFER_BYTES)
        self._wanted_tool = options.get("tool", "")
        self._tool: Tool | None = None
        self._facts: dict[str, Any] = {}
        self._deleted = self._deleted_bytes = self._left_bytes = 0
        self._windows: PacketWindows | None = None

    def _usual_file_bytes(self) -> int:
        size = _RING_FILE_BYTES if self._rule else _FILE_BYTES if self._keep or self._limit_bytes else 0
        return min(size, max(_MIN_FILE_BYTES, self._limit_bytes // _FILES_IN_LIMIT)) if self._limit_bytes else size

    def _tcpdump(self) -> str:
        """Return the path of tcpdump if it is to be used and can work; empty: use the ring."""
        return "" if self._wanted_tool == "ring" or capture_program.cannot_drop_root() else capture_program.find()

    def check(self) -> Check:
        """Check that this user may capture on the interface, and with which program."""
        path = self._tcpdump()
        for reason, remedy in self._obstacles(path):
            if reason:
                return Check("unavailable", reason, remedy)
        tool = "tcpdump" if path else "a ring in Python (tcpdump is not usable here)"
        if any(DEVICES.glob("*")):  # RDMA bypasses the kernel and therefore any capture
            reason = f"{tool} on {self.interface}; RDMA traffic goes past it and is not seen"
            return Check("degraded", reason, "collect 'infiniband' for the RDMA traffic")
        return Check("ok", f"{tool} on {self.interface}")

    def _obstacles(self, path: str) -> Iterator[tuple[str, str]]:
        """Yield the possible obstacles, each with its remedy; the reason is empty if there is no obstacle."""
        yield "" if self.interface else "there is no interface that is up", "name one with --interface"
        found = exists(self.interface)
        yield "" if found else f"there is no interface {self.interface}", "name one that 'ip link' shows"
        refusal = capture_program.refusal(path, self.interface) if path else self._ring_refusal()
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
            return capture_program.filter_error(path, self.interface, self._filter)
        try:
            python_capture.compile_filter(self._filter, LINK_ETHERNET, self._snap_bytes)
        except ValueError as error:
            return str(error)
        return ""

    def start(self) -> None:
        """Start the capture.

        Raises:
            OSError: the program does not start; the message contains its output.
        """
        path = self._tcpdump()
        self._ring.mkdir(parents=True, exist_ok=True)
        self._first = self._ring / f"{self._stem}-0.pcap"
        self._loopback = is_loopback(self.interface)
        self._can_flush = not path or capture_program.version(path) >= _FLUSHES
        self._facts = {
            "tool": "tcpdump" if path else "ring",
            "interface": self.interface,
            "filter": self._filter,
            "snap_bytes": self._snap_bytes,
            "buffer_bytes": self._buffer_bytes,
            "file_bytes": self._file_bytes,
            "begin_ns": time.time_ns(),
            **facts(self.interface),
        }
        line = capture_program.command(path, self._facts, self._first) if path else self._ring_command()
        about = {"collector": self.name, "source": self._facts["tool"], "every_s": self.every_s}
        self._log = RecordWriter(self._folder / self._counts, _FIELDS, about)
        tool = Tool(line)
        try:
            tool.start()
        except OSError:
            self._log.close()
            raise
        self._tool = tool
        if self._rule:
            around_ns, file_bytes = round(self._rule.around_s * 1e9), self._limit_bytes and self._file_bytes
            begin_ns, file_bytes = time.time_ns(), file_bytes or _FILE_BYTES
            self._windows = PacketWindows(self._folder, self._stem, around_ns, begin_ns, file_bytes)
            self._iterations = SlowIterations(self._folder.parent / "steps", self._rule.share)
        self._record("")

    def _ring_command(self) -> list[str]:
        line = python_command(sys.executable, "ringtap.collectors.python_capture", "--interface", self.interface)
        line += ["--write", str(self._first), "--snap-bytes", str(self._snap_bytes)]
        line += ["--ring-bytes", str(self._buffer_bytes), "--file-bytes", str(self._file_bytes)]
        return [*line, self._filter] if self._filter else line

    def sample(self) -> None:
        """Request the counts, flush the file, delete what is not wanted, and end the capture before the disk is full.

        Raises:
            OSError: the capture has ended: its program died, the disk is nearly full, or its size limit is reached.
        """
        if self._tool is None or self._facts.get("ended"):
            return
        self._tool.ask()
        if self._can_flush:
            self._tool.signal("USR2")
        self._rotate()
        if self._windows:
            now_ns = time.time_ns()
            self._windows.add(self._iterations.poll())
            self._windows.decide(self._files(self._ring), self._iterations.reached_ns or now_ns)
        self._make_room()
        full = self._full()
        if full:
            self._tool.stop()
        why = full or self._tool.ended
        self._record(f"early: {why}" if why else "")
        if why:
            raise OSError(0, f"the capture on {self.interface} ended early: {why}")

    def _files(self, folder: Path | None = None) -> list[Path]:
        """Return the capture files, oldest first; those that are kept unless another folder is given."""
        place = folder or self._folder
        return [place / name for name in self._file_names(place)]

    def _file_names(self, folder: Path) -> list[str]:
        """Return the names of the capture files in a folder, oldest first; each of many windows may have one."""
        form = re.compile(rf"{re.escape(self._stem)}-([0-9]+)\.pcap")
        with os.scandir(folder) as entries:
            found = (form.fullmatch(entry.name) for entry in entries)
            return [name for _, name in sorted((int(match[1]), match[0]) for match in found if match)]

    def _rotate(self) -> None:
        """Rename the files (tcpdump appends a number to the first one's name) and delete the oldest."""
        for path in self._ring.glob(f"{glob.escape(self._first.name)}[0-9]*"):
            number = path.name.removeprefix(self._first.name)
            if number.isdecimal():
                path.rename(self._ring / f"{self._stem}-{number}.pcap")
        for path in self._files()[: -self._keep] if self._keep and not self._windows else []:
            self._delete(path)

    def _delete(self, path: Path, following: Path | None = None) -> None:
        self._deleted += 1
        self._deleted_bytes += path.stat().st_size
        if self._windows and following:
            self._windows.lose(path, following)
        else:
            path.unlink()

    def _make_room(self) -> None:
        """Delete the oldest files, except those that are written, until the node's folder is below the limit."""
        limit_bytes = self._limit_bytes or (self._most_bytes if self._windows else 0)
        if not limit_bytes:
            return
        size = folder_bytes(self._folder.parent)
        grown_bytes = size - self._left_bytes
        over_bytes = size - limit_bytes + max(2 * grown_bytes, round(_SPARE_SHARE * limit_bytes))
        self._left_bytes = size
        if over_bytes <= 0:
            return
        kept, ring = self._files(), self._files(self._ring) if self._windows else []
        oldest: list[tuple[Path, Path | None]] = [(path, None) for path in kept[:-1]]
        for path, following in [*oldest, *pairwise(ring)]:
            if over_bytes <= 0:
                return
            deleted_bytes = path.stat().st_size
            self._delete(path, following)
            over_bytes, self._left_bytes = over_bytes - deleted_bytes, self._left_bytes - deleted_bytes

    def _full(self) -> str:
        """Return the reason why there is no room to continue; empty if there is room."""
        if not self._limit_bytes and not self._windows:
            used = sum(path.stat().st_size for path in self._files())
            if used >= self._most_bytes:
                return f"its files reached {used} of {self._most_bytes} bytes"
        disk = os.statvfs(self._folder)
        free = disk.f_bavail * disk.f_frsize
        if free < min(_FREE_BYTES, _FREE_SHARE * disk.f_blocks * disk.f_frsize):
            return f"only {free} bytes are free on its disk, which the job may need"
        return ""

    def _record(self, ended: str) -> None:
        """Append the counts, and rewrite packets.json."""
        assert self._tool is not None
        counts = asdict(self._tool.counts)
        self._log.append(time.time_ns(), time.monotonic_ns(), *(counts[name] for name in _COUNTS))
        self._facts |= counts | {"ended": ended, "end_ns": time.time_ns(), "deleted_files": self._deleted}
        self._facts["deleted_bytes"] = self._deleted_bytes
        if self._windows:
            self._facts["windows"] = self._windows.closed
        # windows are thousands after days, and their log names their files: those of all are listed once, at the end
        if ended or not self._windows:
            self._facts["files"] = self._file_names(self._folder)
        write_json(self._folder / self._json, self._facts)

    def stop(self) -> dict[str, Any]:
        """Wait until the received packets are written, end the program, record its last counts.

        Returns:
            The counts and ``ended``; ``deleted_files`` if the disk limit or ``files`` has asked for it, and the number
            of ``windows`` around slow iterations.
        """
        if self._tool is None:
            return {}
        try:
            how = self._facts.get("ended")
            if not how:
                self._tool.settle(self._loopback)
                early = self._tool.ended
                ended = self._tool.stop()
                how = f"early: {early}" if early else "as asked" if ended else _KILLED
            self._rotate()
            if self._windows:
                self._windows.add(self._iterations.poll())
                self._windows.finish(self._files(self._ring))
                self._ring.rmdir()
            self._make_room()
            self._record(how)
        finally:
            self._tool.kill()
            with contextlib.suppress(OSError):
                self._log.close()
        found = {name: self._facts[name] for name in (*_COUNTS, "ended") if name in self._facts}
        found |= {"deleted_files": self._deleted} if self._deleted else {}
        return found | ({"windows": self._windows.closed} if self._windows else {})
