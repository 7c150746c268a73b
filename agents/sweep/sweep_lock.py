"""Locks out other sweeps: by a lock on the run directory, and a lease on every host that the sweep uses.

Both end with the process that holds them, even if it is killed: the lock is a kernel lock (flock), and the lease is a
socket of the host worker (`ringtap.agents.hosts.link_lease`).
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ringtap.agents.hosts import Hosts
from ringtap.agents.node.agent_control_socket import lock_file
from ringtap.collectors.process_facts import user_name
from ringtap.core.errors import MeasurementError, UsageError
from ringtap.core.untrusted_files import open_regular

LOCK_FILE = "sweep.lock"
_ENDING_S = 10.0  # longest time that a host worker needs to end the processes of its sweep
_POLL_S = 0.25
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


def holder(run: Path, expected_s: float) -> dict[str, Any]:
    """Return facts about the sweep of this process.

    Args:
        run: run directory of the sweep.
        expected_s: expected duration of the sweep in seconds.

    Returns:
        ``{id, user, host, pid, run, since_s, until_s}``; times are Unix times in seconds.
    """
    now_s = int(time.time())
    return {
        "id": secrets.token_hex(8),
        "user": user_name(),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "run": str(run.absolute()),
        "since_s": now_s,
        "until_s": now_s + round(expected_s),
    }


def _describe(found: dict[str, Any]) -> str:
    """Describe the holder of a lock or lease, with start and expected end; unprintable characters are removed.

    Returns:
        Text such as "alice's sweep, process 4711 on desk, since 2026-03-01 10:00 UTC, expected to end at
        2026-03-01 10:40 UTC".
    """
    if found.get("silent"):
        pid, uid = found.get("pid"), found.get("uid")
        return "a sweep that gives no answer" + (f", process {pid} there, of user {uid}" if pid else "")
    text = f"{found.get('user')}'s sweep, process {found.get('pid')} on {found.get('host')}"
    for key, template in (("since_s", ", since {}"), ("until_s", ", expected to end at {}")):
        with suppress(TypeError, ValueError, OverflowError, OSError):
            when = datetime.fromtimestamp(int(str(found.get(key))), timezone.utc)
            text += template.format(when.strftime("%Y-%m-%d %H:%M UTC"))
    return "".join(character for character in text if character.isprintable())[:300]


@contextmanager
def locked(path: Path, me: dict[str, Any], say: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock of a run directory within the block.

    Args:
        path: the run directory, which must exist.
        me: facts about this sweep.
        say: receives a warning for the user if the file system does not support locks.

    Raises:
        UsageError: another sweep uses the run directory, or it cannot be written.
    """
    file = path / LOCK_FILE
    try:
        fd = lock_file(file, 0o644)
    except BlockingIOError:
        raise UsageError(
            f"{path} is being measured by {_describe(_read(file))}: wait for it to end, or end it"
        ) from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise UsageError(f"{file} cannot be written: {error.strerror}") from error
        say(f"warning: the file system of {path} has no locks: make sure that no other sweep measures into it")
        yield
        return
    try:
        os.ftruncate(fd, 0)
        os.write(fd, json.dumps(me).encode() + b"\n")
        yield
    finally:
        with suppress(OSError):
            file.unlink()
        os.close(fd)


def _read(file: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        with open_regular(file) as held:
            found = json.loads(held.read(4096))
        if isinstance(found, dict):
            return found
    return {"silent": True}


def take_leases(hosts: Hosts, me: dict[str, Any], say: Callable[[str], None]) -> None:
    """Take the lease of every host; the leases end when the hosts are disconnected.

    Args:
        hosts: the hosts.
        me: facts about this sweep.
        say: receives a warning for the user if a host does not support leases.

    Raises:
        UsageError: another sweep uses some of the hosts.
        MeasurementError: a host is lost.
    """
    taken: dict[str, dict[str, Any]] = {}
    for name in hosts.names:
        try:
            if found := _take(hosts, name, me):
                taken[name] = found
        except MeasurementError as error:
            if hosts.lost():
                raise
            say(f"warning: {error}: make sure that no other sweep uses it")
    if problem := lease_problem(taken):
        raise UsageError(problem)


def lease_problem(taken: Mapping[str, dict[str, Any]]) -> str:
    """Return an error message that names the sweeps that use hosts; empty if no sweep does.

    Args:
        taken: facts about the sweep that holds the lease, by host.
    """
    users: dict[str, list[str]] = {}
    for name, found in taken.items():
        if found:
            users.setdefault(_describe(found), []).append(name)
    text = "; ".join(f"{', '.join(names)} in use by {user}" for user, names in users.items())
    return f"another sweep measures on these hosts ({text}): wait for it to end, or end it" if text else ""


def _take(hosts: Hosts, name: str, me: dict[str, Any]) -> dict[str, Any]:
    """Take a host's lease; wait up to 10 s if its holder does not answer, as it is probably about to end."""
    deadline_s = time.monotonic() + _ENDING_S
    while (found := hosts.lease(name, me)).get("silent") and time.monotonic() < deadline_s:
        time.sleep(_POLL_S)
    return found
