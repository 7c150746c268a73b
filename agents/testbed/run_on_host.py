"""Runs a command on a host of a testbed: ``python -m ringtap.agents.testbed.run_on_host TESTBED HOST COMMAND…``.

The command keeps standard input and output, the working directory and the process group. It receives the signals sent
to this process and ends with it. This process exits with the command's exit code.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

from ringtap.agents.job import foreground_command
from ringtap.agents.testbed import namespaces, registry
from ringtap.core.errors import UsageError, failure_message
from ringtap.core.parent_death import die_with_parent
from ringtap.core.terminal_escaping import as_command


def _join_namespaces(testbed: registry.TestbedState, host: str) -> None:
    """Enter the host's namespaces; the PID namespace takes effect on the next fork."""
    base = Path(f"/proc/{testbed.pid}")
    folder = Path.cwd()
    # if the user namespace differs, it is entered first, as it permits the others
    names = {"user": namespaces.NEWUSER, "net": namespaces.NEWNET, "mnt": namespaces.NEWNS, "pid": namespaces.NEWPID}
    paths = {name: base / "ns" / name for name in names} | {"net": base / "root" / "run" / "netns" / host}
    fds = []
    for name, kind in names.items():
        if paths[name].stat().st_ino != Path(f"/proc/self/ns/{name}").stat().st_ino:
            fds.append((os.open(paths[name], os.O_RDONLY), kind))
    for fd, kind in fds:
        namespaces.setns(fd, kind)
        os.close(fd)
    namespaces.unshare(namespaces.NEWNS | namespaces.NEWUTS)
    namespaces.set_hostname(host)
    with contextlib.suppress(OSError):  # if refused, /sys/class/net shows the outer interfaces, unlike /proc/net
        namespaces.make_mounts_private()
        namespaces.mount("sysfs", "/sys", "sysfs")
    with contextlib.suppress(OSError):
        os.chdir(folder)


def enter(testbed: registry.TestbedState, host: str, command: list[str]) -> int:
    """Run a command on a host or a switch and return its exit code.

    Raises:
        UsageError: there is no such host, or the testbed cannot be entered because it is another user's or gone.
    """
    if host not in testbed.spec.nodes:
        raise UsageError(f"testbed {testbed.spec.name} has no host {host!r}: it has {', '.join(testbed.spec.nodes)}")
    foreground_command.block_signals()
    try:
        _join_namespaces(testbed, host)
    except OSError as error:
        raise UsageError(
            f"testbed {testbed.spec.name} cannot be entered: {failure_message(error)}; is it yours, and is it up?"
        ) from error
    return foreground_command.relay(foreground_command.spawn(command, os.environ, prepare=die_with_parent()))


def main() -> int:
    """Run the module as a command with the arguments TESTBED HOST COMMAND…"""
    return enter(registry.find(sys.argv[1]), sys.argv[2], sys.argv[3:])


if __name__ == "__main__":
    sys.exit(as_command(main))
