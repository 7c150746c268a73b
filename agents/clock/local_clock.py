"""Reads a node's clocks: CLOCK_REALTIME, its steps, and its kernel state; also the boot identity and file systems."""

from __future__ import annotations

import ctypes
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ringtap.collectors.kernel_files import text_of
from ringtap.core.clock_steps import CLOCK_STEP_NS
from ringtap.core.errors import error_message

_READ_NS = 50_000  # readings further apart than this were interrupted, and are taken again
_READ_TRIES = 8
_STA_UNSYNC, _STA_NANO = 0x0040, 0x2000
_STATES = ("ok", "leap second will be inserted", "leap second will be deleted", "leap second", "leap second ended")
# file systems that only one kernel can mount: two nodes that see the same files there share its kernel and clock
_LOCAL_FILE_SYSTEMS = {
    0xEF53: "ext",
    0x58465342: "xfs",
    0x9123683E: "btrfs",
    0x01021994: "tmpfs",
    0x794C7630: "overlay",
    0xF2F52010: "f2fs",
    0x2FC12FC1: "zfs",
}
_SHARED_FILE_SYSTEMS = {
    0x6969: "nfs",
    0x0BD00BD0: "lustre",
    0x47504653: "gpfs",
    0x19830326: "beegfs",
    0x00C36400: "ceph",
    0x01021997: "9p",
    0x65735546: "fuse",
    0xFF534D42: "cifs",
    0xFE534D42: "smb2",
    0xAAD7AAEA: "panfs",
}


class Clock:
    """The node's clocks; tests substitute one that drifts or steps."""

    def real_ns(self) -> int:
        """CLOCK_REALTIME."""
        return time.time_ns()

    def mono_ns(self) -> int:
        """CLOCK_MONOTONIC."""
        return time.monotonic_ns()

    def of_kernel(self, stamp_ns: int) -> int:
        """The time of a kernel's receive timestamp, which is CLOCK_REALTIME already."""
        return stamp_ns

    def gap_ns(self) -> int:
        """CLOCK_REALTIME minus CLOCK_MONOTONIC, from the closest pair of readings."""
        best = (1 << 62, 0)
        for _ in range(_READ_TRIES):
            before, real, after = self.mono_ns(), self.real_ns(), self.mono_ns()
            best = min(best, (after - before, real - (before + after) // 2))
            if best[0] < _READ_NS:
                break
        return best[1]


class SteadyClock:
    """CLOCK_REALTIME of this machine as if nobody set it after this object was made."""

    def __init__(self) -> None:
        self._gap_ns = Clock().gap_ns()

    def now_ns(self) -> int:
        """Return the time."""
        return time.monotonic_ns() + self._gap_ns


@dataclass(frozen=True)
class ClockStep:
    """A step of CLOCK_REALTIME.

    Attributes:
        t_ns: CLOCK_REALTIME after it.
        mono_ns: CLOCK_MONOTONIC when the step was noticed.
        mono_before_ns: CLOCK_MONOTONIC at the last look before; the step lies between the two.
        step_ns: size of the step; positive if the clock was set forward.
    """

    t_ns: int
    mono_ns: int
    mono_before_ns: int
    step_ns: int


class StepWatch:
    """A watch for steps of CLOCK_REALTIME."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._gap_ns, self._mono_ns = clock.gap_ns(), clock.mono_ns()

    def look(self) -> ClockStep | None:
        """The step since the last look; None if there was none."""
        gap_ns, mono_ns = self._clock.gap_ns(), self._clock.mono_ns()
        step_ns, before_ns = gap_ns - self._gap_ns, self._mono_ns
        self._gap_ns, self._mono_ns = gap_ns, mono_ns
        if abs(step_ns) < CLOCK_STEP_NS:
            return None
        return ClockStep(mono_ns + gap_ns, mono_ns, before_ns, step_ns)


class _Timex(ctypes.Structure):
    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("constant", ctypes.c_long),
        ("precision", ctypes.c_long),
        ("tolerance", ctypes.c_long),
        ("time", ctypes.c_long * 2),
        ("tick", ctypes.c_long),
        ("rest", ctypes.c_long * 20),  # PPS counters, TAI and padding
    )


def adjtimex() -> dict[str, Any]:
    """The state of the kernel's clock, read without changing it.

    Returns:
        ``t_ns``, ``synchronised``, ``state``, ``max_error_us`` and ``estimated_error_us`` (as the time daemon last set
        them; the kernel lets the first grow by 500 ppm), ``frequency_ppm`` (correction in force) and
        ``nanosecond_mode``; or ``t_ns`` and ``missing`` with the reason.
    """
    timex = _Timex()
    try:
        code = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(timex))
    except (OSError, AttributeError) as error:
        return {"t_ns": time.time_ns(), "missing": f"adjtimex: {error_message(error)}"}
    if code < 0:
        return {"t_ns": time.time_ns(), "missing": f"adjtimex: {os.strerror(ctypes.get_errno())}"}
    return {
        "t_ns": time.time_ns(),
        "synchronised": not timex.status & _STA_UNSYNC,
        "state": _STATES[code] if code < len(_STATES) else "not synchronised",
        "max_error_us": timex.maxerror,
        "estimated_error_us": timex.esterror,
        "frequency_ppm": round(timex.freq / 65536, 3),
        "nanosecond_mode": bool(timex.status & _STA_NANO),
    }


def boot_id() -> str:
    """The kernel's boot identity; empty if /proc does not show it."""
    return text_of("/proc/sys/kernel/random/boot_id")


class _Statfs(ctypes.Structure):
    _fields_ = (("type", ctypes.c_long), ("rest", ctypes.c_long * 31))


def file_system(path: Path) -> tuple[str, bool]:
    """Kind of the file system below a path, and True if only one kernel can have it mounted.

    An unknown kind is given as its number and counts as shareable.
    """
    result = _Statfs()
    if ctypes.CDLL(None, use_errno=True).statfs(os.fsencode(path), ctypes.byref(result)) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(path))
    number = result.type & 0xFFFFFFFF
    local = _LOCAL_FILE_SYSTEMS.get(number)
    return local or _SHARED_FILE_SYSTEMS.get(number, f"0x{number:x}"), local is not None
