"""Creates and enters Linux namespaces, and mounts file systems, by calls of the C library.

Python has ``os.unshare`` and ``os.setns`` only since 3.12.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from ringtap.core.errors import UsageError

NEWNS = 0x00020000
NEWUTS = 0x04000000
NEWUSER = 0x10000000
NEWPID = 0x20000000
NEWNET = 0x40000000
_MS_BIND = 0x1000
_MS_REC = 0x4000
_MS_PRIVATE = 1 << 18

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def unshare(flags: int) -> None:
    """Move this process (its children, for NEWPID) into new namespaces."""
    _check(_libc.unshare(flags), "unshare")


def setns(fd: int, kind: int) -> None:
    """Enter the namespace that ``fd`` refers to."""
    _check(_libc.setns(fd, kind), "setns")


def mount(source: str, target: str, kind: str | None = None, flags: int = 0, options: str = "") -> None:
    """Mount a file system."""
    result = _libc.mount(
        source.encode(), target.encode(), kind.encode() if kind else None, ctypes.c_ulong(flags), options.encode()
    )
    _check(result, f"mount {target}")


def bind(source: str, target: str) -> None:
    """Bind-mount ``source`` on ``target``."""
    mount(source, target, flags=_MS_BIND)


def make_mounts_private() -> None:
    """Keep the mounts of this mount namespace from propagating to others."""
    mount("none", "/", flags=_MS_REC | _MS_PRIVATE)


def set_hostname(name: str) -> None:
    """Set the host name of this UTS namespace."""
    _check(_libc.sethostname(name.encode(), len(name)), "sethostname")


def isolate(kinds: int) -> None:
    """Enter new namespaces of these kinds, inside a new user namespace if this process lacks the privilege.

    Raises:
        UsageError: the kernel refuses them with and without a user namespace.
    """
    try:
        unshare(kinds)
        return
    except PermissionError:
        pass
    uid, gid = os.geteuid(), os.getegid()
    try:
        unshare(NEWUSER)
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
        Path("/proc/self/gid_map").write_text(f"0 {gid} 1")
        unshare(kinds)
    except OSError as error:
        raise UsageError(
            f"user {uid} may make no network namespaces here ({error.strerror}): run as root, or have user namespaces "
            "allowed (user.max_user_namespaces above 0; on Ubuntu kernel.apparmor_restrict_unprivileged_userns=0)"
        ) from error
