"""Runs the init process of a testbed: the first process of its PID namespace, so its end also ends everything in it.

`ringtap.agents.testbed.start_testbed` starts it. It writes a JSON line per stage to standard output and reads commands
from standard input: end of file ends the testbed, and ``stay`` makes it outlive the process that started it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

from ringtap.agents.testbed import namespaces
from ringtap.agents.testbed.topology import JobShare, TestbedSpec
from ringtap.core.errors import RingtapError, UsageError, error_message, failure_message
from ringtap.core.terminal_escaping import fill_standard_descriptors


def _report(item: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(item) + "\n")
    sys.stdout.flush()


def _mount_own() -> None:
    """Mount the testbed's own /proc and /run, which end with it."""
    try:
        namespaces.make_mounts_private()
        namespaces.mount("proc", "/proc", "proc")
        namespaces.mount("tmpfs", "/run", "tmpfs", options="mode=755")
    except OSError as error:
        raise UsageError(
            f"the testbed cannot mount its own /proc and /run ({error_message(error)}): is the container locked down?"
        ) from error


def _run(spec: TestbedSpec) -> None:
    """Build the testbed, measure its links and read their counters on request, and run until standard input ends.

    After ``stay``, run forever.
    """
    from ringtap.agents.testbed import build
    from ringtap.agents.testbed.htb_link_shares import LinkShares, congestion_controls

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.stdin.readline().strip() != "go":  # `up` has not recorded this testbed
        return
    try:
        _mount_own()
        build.build(spec)
        namespaces.bind(build.HOSTS_FILE, "/etc/hosts")
        shares = LinkShares(spec)
        _report({"built": True})
        counters = build.LinkCounters(spec.links)
        while (command := sys.stdin.readline().strip()) not in ("", "stay"):
            verb, _, rest = command.partition(" ")
            if verb == "verify":
                _report({"links": build.measure_links(spec, list(map(int, rest.split())))})
            elif verb == "count":
                _report({"counts": counters.read()})
            elif verb == "share":
                links, given, paths = json.loads(rest)
                _report({"shared": shares.set(dict(links), [JobShare(*share) for share in given], paths)})
            elif verb == "controls":
                _report({"controls": congestion_controls(spec)})
            else:
                # reaps orphans, which the first process of a PID namespace inherits
                signal.signal(signal.SIGCHLD, signal.SIG_IGN)
                _report({"ready": True})
    except RingtapError as error:
        _report({"error": str(error), "exit_code": error.exit_code})
        return
    except Exception as error:  # nobody sees a traceback of the init process: `up` reports this message
        _report({"error": f"the testbed failed: {failure_message(error)}", "exit_code": 1})
        return
    if command == "stay":
        _report({"stays": True})
        null = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(null, fd)
        while True:
            signal.pause()


def main() -> int:
    """Enter new namespaces, fork the init process and report its pid; return the exit code."""
    fill_standard_descriptors()
    spec = TestbedSpec.from_json(json.loads(sys.argv[1]))
    try:
        namespaces.isolate(namespaces.NEWNS | namespaces.NEWNET | namespaces.NEWPID | namespaces.NEWUTS)
    except RingtapError as error:
        _report({"error": str(error), "exit_code": error.exit_code})
        return error.exit_code
    pid = os.fork()
    if pid == 0:
        _run(spec)
        os._exit(0)
    _report({"pid": pid})
    return 0


if __name__ == "__main__":
    sys.exit(main())
