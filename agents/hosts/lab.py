"""The hosts of a virtual testbed: namespaces of this machine, so files are shared."""

from __future__ import annotations

import sys

from ringtap.agents.hosts.local import LocalHosts
from ringtap.agents.lab.topology import LabSpec


class LabHosts(LocalHosts):
    """The hosts of a testbed as places to run things.

    Args:
        spec: the testbed, which stands.
    """

    def __init__(self, spec: LabSpec) -> None:
        super().__init__(spec.hosts)
        self.spec = spec

    def _enter(self, host: str) -> list[str]:
        return [sys.executable, "-m", "ringtap.agents.lab.enter", self.spec.name, host]
