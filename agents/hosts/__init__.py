"""Hosts as places to run things: this machine, a virtual testbed, servers over ssh, nodes of a Slurm allocation."""

from __future__ import annotations

import sys

from ringtap.agents.hosts.base import HostProcess, Hosts
from ringtap.agents.hosts.lab import LabHosts
from ringtap.agents.hosts.local import LocalHosts

RINGTAP = (sys.executable, "-m", "ringtap.cli")

__all__ = ["RINGTAP", "HostProcess", "Hosts", "LabHosts", "LocalHosts"]
