"""Reads files of /proc and /sys that may be missing, and the control groups by which the kernel limits this process."""

from __future__ import annotations

from pathlib import Path

PROC = Path("/proc")
CGROUP_FILE = PROC / "self/cgroup"
CGROUP_ROOT = Path("/sys/fs/cgroup")


def text_of(file: str | Path) -> str:
    """Return the text of one of the kernel's files without blanks around it; empty if it cannot be read."""
    try:
        return Path(file).read_text(errors="replace").strip()
    except OSError:
        return ""


def stat_of(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the state (field 3 in proc(5)) on; none without the process."""
    return text_of(PROC / str(pid) / "stat").rpartition(")")[2].split()


def control_groups(file: Path = CGROUP_FILE, root: Path = CGROUP_ROOT) -> list[tuple[str, Path]]:
    """Return the control groups of versions 1 and 2 up to the root, the innermost first, as (controllers, folder).

    Controllers are empty for version 2. The list is empty where the kernel has none.

    Args:
        file: names this process's control groups.
        root: where control groups are mounted.
    """
    found = []
    for line in text_of(file).splitlines():
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        base = root / controllers
        folder = base / path.lstrip("/")
        found += [(controllers, parent) for parent in (folder, *folder.parents) if parent.is_relative_to(base)]
    return found


def memory_groups(file: Path = CGROUP_FILE, root: Path = CGROUP_ROOT) -> list[tuple[Path, str, str]]:
    """Return the `control_groups` for memory: folder, and the names of its files of events and of the limit in it."""
    found = []
    for controllers, folder in control_groups(file, root):
        if not controllers:
            found.append((folder, "memory.events", "memory.max"))
        elif "memory" in controllers.split(","):
            found.append((folder, "memory.oom_control", "memory.limit_in_bytes"))
    return found
