"""Finds this process's control groups, of version 1 and 2, by which the kernel limits memory and processors."""

from __future__ import annotations

from pathlib import Path

CGROUP_FILE = Path("/proc/self/cgroup")
CGROUP_ROOT = Path("/sys/fs/cgroup")


def control_groups(file: Path = CGROUP_FILE, root: Path = CGROUP_ROOT) -> list[tuple[str, Path]]:
    """Return the control groups up to the root, the innermost first, as (controllers, folder).

    Controllers are empty for version 2. The list is empty where the kernel has none.

    Args:
        file: names this process's control groups.
        root: where control groups are mounted.
    """
    found = []
    for line in read(file).splitlines():
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        base = root / controllers
        folder = base / path.lstrip("/")
        found += [(controllers, parent) for parent in (folder, *folder.parents) if parent.is_relative_to(base)]
    return found


def read(file: Path) -> str:
    """Return the text of one of the kernel's files; empty if it cannot be read."""
    try:
        return file.read_text(errors="replace")
    except OSError:
        return ""
