"""A testbed's init process: the first process of its PID namespace, so its end also ends everything in it.

`ringtap.agents.testbed.up` starts it. It reports one JSON line per stage on standard output and waits on standard
input: end of file ends the testbed, the word ``stay`` makes it outlive the process that started it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

from ringtap.agents.testbed import namespaces
from ringtap.agents.testbed.topology import TestbedSpec
from ringtap.errors import RingtapError, UsageError
from ringtap.terminal import fill_standard_descriptors


def _say(item: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(item) + "\n")
    sys.stdout.flush()


def _furnish() -> None:
    """Mount the testbed's own /proc and /run, which end with it."""
    try:
        namespaces.make_mounts_private()
        namespaces.mount("proc", "/proc", "proc")
        namespaces.mount("tmpfs", "/run", "tmpfs", options="mode=755")
    except OSError as error:
        raise UsageError(
            f"the testbed cannot mount its own /proc and /run ({error}): is this a locked-down container?"
        ) from error


def _hold(spec: TestbedSpec) -> None:
    """Build the testbed, measure its links on request, and run until standard input ends, after ``stay`` for good."""
    from ringtap.agents.testbed import build

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.stdin.readline().strip() != "go":  # `up` has not recorded this testbed
        return
    try:
        _furnish()
        build.build(spec)
        namespaces.bind(build.HOSTS_FILE, "/etc/hosts")
        _say({"built": True})
        while (word := sys.stdin.readline().strip()) == "verify":
            _say({"links": build.measure_links(spec)})
    except RingtapError as error:
        _say({"error": str(error), "exit_code": error.exit_code})
        return
    except Exception as error:  # the init process cannot show a traceback: `up` reports the sentence
        _say({"error": f"the testbed could not be built: {type(error).__name__}: {error}", "exit_code": 1})
        return
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the first process of a PID namespace inherits orphans
    if word == "ready":
        _say({"ready": True})
        word = sys.stdin.readline().strip()
    if word == "stay":
        _say({"stays": True})
        null = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(null, fd)
        while True:
            signal.pause()


def main() -> int:
    """Enter new namespaces, fork the init process and report its pid; returns the exit code."""
    fill_standard_descriptors()
    spec = TestbedSpec.from_json(json.loads(sys.argv[1]))
    try:
        namespaces.isolate(namespaces.NEWNS | namespaces.NEWNET | namespaces.NEWPID | namespaces.NEWUTS)
    except RingtapError as error:
        _say({"error": str(error), "exit_code": error.exit_code})
        return error.exit_code
    pid = os.fork()
    if pid == 0:
        _hold(spec)
        os._exit(0)
    _say({"pid": pid})
    return 0


if __name__ == "__main__":
    sys.exit(main())
