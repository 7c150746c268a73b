"""What this process may have: open files, processors."""

from __future__ import annotations

import os
import resource
import sys

_PROCESSORS_A_LOOP = 4  # a launcher, the kernel's own work and the job beside us want theirs
_MOST_LOOPS = 4


def raise_file_limit(wanted: int) -> int:
    """Raise the soft limit of open files towards ``wanted``; returns the limit then in force."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return wanted
    for limit in ((wanted, max(wanted, hard)), (min(wanted, hard), hard)):  # above the hard limit: root only
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, limit)
        except (OSError, ValueError):
            continue
        return limit[0]
    return soft


def usual_crew() -> tuple[int, int]:
    """Processes, and threads in each, that suit this host: threads where the interpreter has no global lock."""
    loops = max(1, min(_MOST_LOOPS, len(os.sched_getaffinity(0)) // _PROCESSORS_A_LOOP))
    locked = getattr(sys, "_is_gil_enabled", lambda: True)()
    return (loops, 1) if locked else (1, loops)
