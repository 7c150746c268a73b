"""Hosts on this machine: the machine itself, and the namespaces of a testbed."""

from __future__ import annotations

import sys

from ringtap.agents.hosts.remote import WORKER_COMMAND, RemoteHosts
from ringtap.agents.testbed.topology import TestbedSpec


class LocalHosts(RemoteHosts):
    """This machine under one or several host names.

    Args:
        names: names of the hosts.
    """

    def command(self, host: str) -> list[str]:  # noqa: ARG002
        """Command of a host worker that runs as a child of this process."""
        return [sys.executable, *WORKER_COMMAND]


class TestbedHosts(RemoteHosts):
    """Hosts of a testbed, on which commands are run; its switch is one of them.

    Args:
        spec: the testbed, which must be running.
    """

    def __init__(self, spec: TestbedSpec) -> None:
        super().__init__(spec.hosts)
        self.spec = spec

    def command(self, host: str) -> list[str]:
        """Command of a host worker in the host's namespaces."""
        enter = [sys.executable, "-m", "ringtap.agents.testbed.enter", self.spec.name, host]
        return [*enter, sys.executable, *WORKER_COMMAND]

    def stop_all(self) -> None:
        """End all processes started here, the newest first, and the host workers, as the testbed may end next."""
        super().stop_all()
        self.leave()
