"""Runs a command on a host of a testbed: ``python -m ringtap.agents.lab.enter LAB HOST COMMAND…``.

The command keeps standard input and output, the working directory and the process group; signals sent to this process reach
it, its exit code is passed on, and it ends with this process.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path
from typing import NoReturn

from ringtap.agents.lab import namespaces, state
from ringtap.agents.lab.topology import SWITCH
from ringtap.errors import RingtapError, UsageError

_SI_KERNEL = 0x80
_FORWARDED = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2}


def _join_namespaces(lab: state.LabState, host: str) -> None:
    """Enter the host's namespaces; the PID namespace takes effect on the next fork."""
    base = Path(f"/proc/{lab.pid}")
    folder = Path.cwd()
    kinds = [("user", namespaces.NEWUSER), ("mnt", namespaces.NEWNS), ("pid", namespaces.NEWPID)]
    fds = []
    for name, kind in kinds:
        if (base / "ns" / name).stat().st_ino != Path(f"/proc/self/ns/{name}").stat().st_ino:
            fds.append((os.open(base / "ns" / name, os.O_RDONLY), kind))
    fds.insert(1, (os.open(base / "root" / "run" / "netns" / host, os.O_RDONLY), namespaces.NEWNET))
    if os.geteuid() == 0:
        fds = fds[1:2] + fds[0:1] + fds[2:]
    for fd, kind in fds:
        namespaces.setns(fd, kind)
        os.close(fd)
    namespaces.unshare(namespaces.NEWNS | namespaces.NEWUTS)
    namespaces.set_hostname(host)
    with contextlib.suppress(OSError):  # where refused, /sys/class/net shows the outer interfaces; /proc/net is right
        namespaces.make_mounts_private()
        namespaces.mount("sysfs", "/sys", "sysfs")
    with contextlib.suppress(OSError):
        os.chdir(folder)


def _become(command: list[str], parent_pid: int) -> NoReturn:
    del parent_pid
    namespaces.die_with_parent(signal.SIGKILL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"ringtap: {command[0]} cannot be run: {error.strerror}", file=sys.stderr)
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)


def _relay(pid: int) -> int:
    """Wait for the command, passing signals on; returns its exit code (128 + signal where one ended it)."""
    while True:
        info = signal.sigwaitinfo(_FORWARDED | {signal.SIGCHLD})
        if info.si_signo == signal.SIGCHLD:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                code = os.waitstatus_to_exitcode(status)
                return code if code >= 0 else 128 - code
        elif info.si_code != _SI_KERNEL:  # a terminal's own signals reach the whole process group
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, info.si_signo)


def enter(lab: state.LabState, host: str, command: list[str]) -> int:
    """Run a command on a host (or the switch) and return its exit code.

    Raises:
        UsageError: no such host, or the testbed is another user's.
    """
    if host not in (*lab.spec.hosts, SWITCH):
        raise UsageError(f"testbed {lab.spec.name} has no host {host!r}: it has {', '.join((*lab.spec.hosts, SWITCH))}")
    signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED | {signal.SIGCHLD})
    try:
        _join_namespaces(lab, host)
    except OSError as error:
        raise UsageError(f"testbed {lab.spec.name} cannot be entered: {error}; is it yours and standing?") from error
    pid = os.fork()
    if pid == 0:
        _become(command, os.getpid())
    return _relay(pid)


def main() -> int:
    """The module as a command: LAB HOST COMMAND…"""
    try:
        return enter(state.find(sys.argv[1]), sys.argv[2], sys.argv[3:])
    except RingtapError as error:
        print(f"ringtap: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
