"""Hosts that run commands: this machine, a virtual testbed, servers over ssh, or nodes of a Slurm allocation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ringtap.agents.hosts.base import HostProcess, Hosts, understood

if TYPE_CHECKING:
    from ringtap.agents.hosts.remote import LocalHosts, TestbedHosts

__all__ = ["HostProcess", "Hosts", "LocalHosts", "TestbedHosts", "understood"]


def __getattr__(name: str) -> Any:
    """Import `LocalHosts` and `TestbedHosts` on first use, as the host worker does not need them."""
    if name in ("LocalHosts", "TestbedHosts"):
        from ringtap.agents.hosts import remote

        return getattr(remote, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
