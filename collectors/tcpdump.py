"""How tcpdump is started here, and whether it can be."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

_ASK_S = 0.9


def find() -> str:
    """Path of tcpdump; empty where it is not installed. Many put it where an ordinary user's path does not lead."""
    places = os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin", "/usr/local/sbin"))
    return shutil.which("tcpdump", path=places) or ""


def _ask(arguments: list[str]) -> tuple[int, str]:
    try:
        done = subprocess.run(arguments, capture_output=True, text=True, check=False, timeout=_ASK_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return 1, str(error)
    return done.returncode, (done.stdout + done.stderr).strip()


def version(path: str) -> tuple[int, ...]:
    """Its version, ``(4, 99, 3)``; empty where it does not tell."""
    match = re.search(r"version (\d+)\.(\d+)(?:\.(\d+))?", _ask([path, "--version"])[1])
    return tuple(int(part) for part in match.groups(default="0")) if match else ()


def cannot_drop_root() -> bool:
    """Whether this is the root of a user namespace with one user, where tcpdump fails to change to any user."""
    try:
        return os.geteuid() == 0 and Path("/proc/self/setgroups").read_text().strip() == "deny"
    except OSError:
        return False


def refusal(path: str, interface: str) -> str:
    """Why it may not capture on an interface; empty where it may. Opens the interface and captures nothing."""
    code, said = _ask([path, "-i", interface, "-L"])
    return said.replace("\n", " ") if code else ""


def filter_error(path: str, interface: str, words: str) -> str:
    """What is wrong with a filter; empty where nothing is."""
    code, said = _ask([path, "-i", interface, "-d", words])
    return said.removeprefix("tcpdump: ").splitlines()[0] if code and said else ""


def command(path: str, wanted: dict[str, Any], file: Path) -> list[str]:
    """The command line.

    Args:
        path: tcpdump itself.
        wanted: ``interface``, ``snap_bytes``, ``buffer_bytes``, ``file_bytes`` (begin another file after so many, in
            whole MB; 0: never) and ``filter``.
        file: first file; the following ones have 1, 2, … appended.
    """
    line = [path, "-n", "-i", wanted["interface"], "-s", str(wanted["snap_bytes"])]
    line += ["-B", str(wanted["buffer_bytes"] // 1024), "--time-stamp-precision=nano", "-w", str(file)]
    if os.geteuid() == 0:
        # as another user it could not begin the second file in a folder that is not its own
        line += ["-Z", "root"]
    if wanted["file_bytes"]:
        line += ["-C", str(max(1, wanted["file_bytes"] // 1_000_000))]
    return [*line, wanted["filter"]] if wanted["filter"] else line
