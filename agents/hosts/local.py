"""This machine as the host of a measurement."""

from __future__ import annotations

import sys

from ringtap.agents.hosts.remote import SERVANT, RemoteHosts


class LocalHosts(RemoteHosts):
    """This machine, under one name or several.

    Args:
        names: the hosts.
    """

    def command(self, host: str) -> list[str]:  # noqa: ARG002
        """A servant that is a child of this process."""
        return [sys.executable, *SERVANT]
