"""Facts about this machine, and the share of its CPU time used by its host and by other programs."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any


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
        "iperf3": _first_line("iperf3"),
        "congestion_control": Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip(),
    }


def _first_line(program: str) -> str | None:
    path = shutil.which(program)
    if path is None:
        return None
    done = subprocess.run([path, "--version"], capture_output=True, text=True, check=False, timeout=10)
    return (done.stdout or done.stderr).partition("\n")[0]


@dataclass(frozen=True)
class CpuTimes:
    """Clock ticks since boot, of all cores together.

    Attributes:
        total: all ticks.
        used: ticks of all programs, and of the kernel on their behalf.
        stolen: ticks that a virtual machine's host gave to others.
        ours_s: user and system time of this process and of those that it has waited for, in seconds.
    """

    total: int
    used: int
    stolen: int
    ours_s: float

    @staticmethod
    def now() -> CpuTimes:
        """Read the current times from /proc/stat."""
        columns = [int(word) for word in Path("/proc/stat").read_text().partition("\n")[0].split()[1:9]]
        ours_s = sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        # Interrupts count as used: the kernel adds their time to that of the interrupted program, including ours
        return CpuTimes(sum(columns), sum(columns[:3]) + sum(columns[5:7]), columns[7], ours_s)

    def stolen_pct_since(self) -> float:
        """Return the per cent of all cores' time that was stolen since this reading."""
        now = CpuTimes.now()
        return 100 * (now.stolen - self.stolen) / max(1, now.total - self.total)

    def others_pct_since(self) -> float:
        """Return the per cent of all cores' time that other programs used since this reading.

        Other programs are all but this process and its children that have ended.
        """
        now = CpuTimes.now()
        used = now.used - self.used - (now.ours_s - self.ours_s) * os.sysconf("SC_CLK_TCK")
        return 100 * max(0.0, used) / max(1, now.total - self.total)


def congestion_control(option: str) -> list[str]:
    """Return ``option`` with cubic if the kernel has it, as in the thesis; a default may be bbr, which paces."""
    known = Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text().split()
    return [option, "cubic"] if "cubic" in known else []
