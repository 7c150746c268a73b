"""How many connections this process may hold."""

from __future__ import annotations

import resource


def raise_file_limit(wanted: int) -> int:
    """Raise the soft limit of open files towards ``wanted``; returns the limit then in force."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return wanted
    reachable = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, reachable), hard))
    except (OSError, ValueError):
        return soft
    return max(soft, reachable)
