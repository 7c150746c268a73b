"""This machine as the host of a measurement."""

from __future__ import annotations

import sys

from ringtap.agents.hosts.remote import WORKER_COMMAND, RemoteHosts


class LocalHosts(RemoteHosts):
    """This machine under one or several host names.

    Args:
        names: names of the hosts.
    """

    def command(self, host: str) -> list[str]:  # noqa: ARG002
        """Command of a host worker that runs as a child of this process."""
        return [sys.executable, *WORKER_COMMAND]
