"""Construction of a testbed from outside: starts its init process, records it and verifies its links."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

from ringtap.agents.testbed import registry
from ringtap.agents.testbed.topology import TestbedSpec
from ringtap.errors import MeasurementError, RingtapError, UsageError

RATE_TOLERANCE = 0.05
VERIFY_TRIES = 4


class RunningTestbed:
    """Running testbed that this process has built; as a context manager, it ends with the block.

    Unless `stay` is called, the testbed also ends with this process: its init process sees its standard input closed.
    """

    def __init__(self, spec: TestbedSpec, *, verify: bool = True) -> None:
        self._init_process = self._start(spec)
        try:
            self.state = self._record(spec)
            self._send("go")
            self._expect("built")
            self.state = replace(self.state, links=self._verify() if verify else [])
            self._send("ready")
            self._expect("ready")
            self.state.save()
        except BaseException:
            self.close()
            raise

    @staticmethod
    def _start(spec: TestbedSpec) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "ringtap.agents.testbed.init_process", json.dumps(spec.to_json())]
        return subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )

    def _record(self, spec: TestbedSpec) -> registry.TestbedState:
        pid = int(self._expect("pid")["pid"])
        self._init_process.wait()
        ticks = registry.start_ticks(pid)
        if ticks is None:
            raise MeasurementError("the testbed's init process ended at once")
        with registry.locked():
            for testbed in registry.all_testbeds():
                if testbed.spec.name == spec.name and testbed.alive():
                    raise UsageError(
                        f"testbed {spec.name} is up already: ringtap testbed down {spec.name}, or --name another"
                    )
            entry = registry.TestbedState(spec, pid, ticks, os.getpid(), [])
            entry.save()
        return entry

    def _verify(self) -> list[dict[str, Any]]:
        """Return measured rates of the links; rates that are off, as on a busy machine, are measured again."""
        for _ in range(VERIFY_TRIES):
            self._send("verify")
            links: list[dict[str, Any]] = self._expect("links")["links"]
            if not rate_warnings(links):
                break
        return links

    def _send(self, command: str) -> None:
        assert self._init_process.stdin is not None
        try:
            self._init_process.stdin.write(command + "\n")
            self._init_process.stdin.flush()
        except BrokenPipeError as error:
            raise MeasurementError("the testbed's init process ended early") from error

    def _expect(self, key: str) -> dict[str, Any]:
        assert self._init_process.stdout is not None
        line = self._init_process.stdout.readline()
        item: dict[str, Any] = (
            json.loads(line) if line else {"error": "the testbed's init process ended early", "exit_code": 1}
        )
        if "error" in item:
            raise (UsageError if item["exit_code"] == 2 else MeasurementError)(item["error"])
        if key not in item:
            raise RingtapError(f"the testbed's init process sent {item} instead of {key}")
        return item

    def stay(self) -> None:
        """Make the testbed outlive this process."""
        self._send("stay")
        self._expect("stays")
        self.state = replace(self.state, owner_pid=0)
        self.state.save()

    def close(self) -> None:
        """End the testbed and everything that runs in it."""
        if hasattr(self, "state"):
            with registry.locked():
                registry.remove(self.state)
        assert self._init_process.stdin is not None
        assert self._init_process.stdout is not None
        self._init_process.stdin.close()
        self._init_process.stdout.read()  # returns when the init process, which holds the other end, has ended
        self._init_process.stdout.close()
        self._init_process.wait()

    def __enter__(self) -> RunningTestbed:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def rate_warnings(links: list[dict[str, Any]]) -> list[str]:
    """Return one line per link direction whose rate is off by more than 5 %."""
    return [
        f"{link['host']} {link['direction']}: {link['measured_bps'] / 1e6:.1f} of {link['asked_bps'] / 1e6:.1f} Mbit/s"
        for link in links
        if abs(link["measured_bps"] / link["asked_bps"] - 1) > RATE_TOLERANCE
    ]
