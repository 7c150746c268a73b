"""The hosts of a virtual testbed: namespaces of this machine, so files are shared."""

from __future__ import annotations

import sys

from ringtap.agents.hosts.remote import SERVANT, RemoteHosts
from ringtap.agents.testbed.topology import TestbedSpec


class TestbedHosts(RemoteHosts):
    """The hosts of a testbed as places to run things; its switch is one, too.

    Args:
        spec: the testbed, which stands.
    """

    def __init__(self, spec: TestbedSpec) -> None:
        super().__init__(spec.hosts)
        self.spec = spec

    def command(self, host: str) -> list[str]:
        """A servant in the host's namespaces."""
        enter = [sys.executable, "-m", "ringtap.agents.testbed.enter", self.spec.name, host]
        return [*enter, sys.executable, *SERVANT]

    def stop_all(self) -> None:
        """End everything started here, the newest first, and the servants: the testbed may be about to end."""
        super().stop_all()
        self.leave()
