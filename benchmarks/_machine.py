"""Describes this machine, and measures the share of its CPU time that its host and other programs take."""

from __future__ import annotations

import os
import platform
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil


def cores() -> list[int]:
    """Return the cores that the benchmark may use."""
    return sorted(os.sched_getaffinity(0))


def describe() -> dict[str, Any]:
    """Return the date and a description of the machine, without its name."""
    models = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.lower().startswith(("model name", "hardware"))
    ]
    return {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "cpu": models[0] if models else platform.machine(),
        "cores": len(cores()),
        "memory_gb": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9, 1),
        "kernel": platform.release(),
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "congestion_control": Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip(),
    }


@dataclass(frozen=True)
class CpuTimes:
    """Seconds of CPU time since boot, of all cores together.

    Attributes:
        total_s: all time.
        used_s: time of all programs, and of the kernel on their behalf.
        stolen_s: time that a virtual machine's host gave to others.
        ours_s: time of this process and of those that it has waited for.
    """

    total_s: float
    used_s: float
    stolen_s: float
    ours_s: float

    @staticmethod
    def now() -> CpuTimes:
        """Read the current times."""
        times = psutil.cpu_times()
        # Interrupts count as used: the kernel adds their time to that of the interrupted program, including ours
        used_s = times.user + times.nice + times.system + times.irq + times.softirq
        return CpuTimes(used_s + times.idle + times.iowait + times.steal, used_s, times.steal, sum(os.times()[:4]))

    def stolen_pct_since(self) -> float:
        """Return the per cent of all cores' time that was stolen since this reading."""
        now = CpuTimes.now()
        return 100 * (now.stolen_s - self.stolen_s) / max(0.01, now.total_s - self.total_s)

    def others_pct_since(self) -> float:
        """Return the per cent of all cores' time that other programs used since this reading.

        Other programs are all but this process and its children that have ended.
        """
        now = CpuTimes.now()
        used_s = now.used_s - self.used_s - (now.ours_s - self.ours_s)
        return 100 * max(0.0, used_s) / max(0.01, now.total_s - self.total_s)


def congestion_control(option: str) -> list[str]:
    """Return ``option`` with cubic if the kernel has it, as in the thesis; a default may be bbr, which paces."""
    known = Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text().split()
    return [option, "cubic"] if "cubic" in known else []
