"""Runs commands on hosts: this machine, a virtual testbed, servers over ssh, or nodes of a Slurm allocation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ringtap.agents.hosts.remote import HostProcess, Hosts, LocalHosts, TestbedHosts, understood

__all__ = ["HostProcess", "Hosts", "LocalHosts", "TestbedHosts", "understood"]


def __getattr__(name: str) -> Any:
    """Import the controller's modules on first use; the host worker does not need them."""
    if name in __all__:
        from ringtap.agents.hosts import remote

        return getattr(remote, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
