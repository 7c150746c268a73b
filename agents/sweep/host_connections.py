"""Connects to the hosts of a cluster, and detects lost hosts as the cause of a failed measurement."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from ringtap.agents.hosts import Hosts, LocalHosts, TestbedHosts
from ringtap.agents.hosts.slurm_nodes import SlurmHosts, allocated_nodes
from ringtap.agents.hosts.ssh import SshHost, SshHosts
from ringtap.core.errors import MeasurementError, UsageError
from ringtap.core.sweep_plans.cluster_hosts import Cluster
from ringtap.core.units import counted

_ANSWER_S = 10.0
_AT_ONCE = 8


class LostHostError(MeasurementError):
    """A host of the measurement is lost."""


def check_lost(hosts: Hosts) -> None:
    """Check that no host is known to be lost.

    Raises:
        LostHostError: a host is lost.
    """
    if lost := hosts.lost():
        raise LostHostError(_describe(lost))


def check_alive(hosts: Hosts) -> None:
    """Check that every host answers.

    Raises:
        LostHostError: a host is lost or does not answer.
    """
    if lost := hosts.lost() or _silent(hosts):
        raise LostHostError(_describe(lost))


def _describe(lost: Mapping[str, str]) -> str:
    """Describe the loss of hosts; only printable characters are kept, as a host's last output may contain anything."""
    by_reason: dict[str, list[str]] = {}  # hosts behind one jump host or switch are lost for the same reason
    for name, why in lost.items():
        by_reason.setdefault(" ".join(why.split()), []).append(name)
    text = "; ".join(
        f"hosts {', '.join(names)} were lost: {why}" if len(names) > 1 else f"host {names[0]} was lost: {why}"
        for why, names in by_reason.items()
    )
    return "".join(character for character in text if character.isprintable())


@contextmanager
def losses_named(hosts: Hosts) -> Iterator[None]:
    """Report the loss of a host as the reason if the measurement within the block fails.

    The other ranks of a job fail at once, but the connection may notice a loss much later, so every host is queried.

    Raises:
        LostHostError: the measurement failed, and a host is lost.
    """
    try:
        yield
    except LostHostError:
        raise
    except MeasurementError as error:
        if lost := hosts.lost() or _silent(hosts):
            raise LostHostError(f"{_describe(lost)} ({error})") from error
        raise


def _silent(hosts: Hosts) -> dict[str, str]:
    """Return the hosts that do not answer now, with the reason; this machine and its testbeds are not queried."""
    if isinstance(hosts, LocalHosts | TestbedHosts):
        return {}

    def problem(host: str) -> str:
        try:
            hosts.ask(host, ["true"], _ANSWER_S)
        except MeasurementError as error:
            return hosts.lost().get(host) or str(error)
        return ""

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        found = dict(zip(hosts.names, pool.map(problem, hosts.names), strict=True))
    return {host: reason for host, reason in found.items() if reason}


@contextmanager
def reached(cluster: Cluster, *, all_needed: bool = True) -> Iterator[Hosts]:
    """Connect to the hosts of a cluster within the block; all processes started on them end with it.

    Args:
        cluster: the cluster.
        all_needed: if True, an unreachable server is an error; otherwise it counts as lost.

    Raises:
        UsageError: a host cannot be reached, ssh or Slurm's commands are missing, or this process does not run in an
            allocation.
    """
    hosts = _connect(cluster, all_needed)
    try:
        yield hosts
    finally:
        hosts.close()


def _connect(cluster: Cluster, all_needed: bool) -> Hosts:
    if cluster.reach == "local":
        return LocalHosts([host.name for host in cluster.hosts])
    if cluster.reach == "ssh":
        servers = [SshHost(host.name, host.ssh, host.python or sys.executable, host.workdir) for host in cluster.hosts]
        return SshHosts(servers, all_needed=all_needed)
    pythons = {host.name: host.python for host in cluster.hosts if host.python}
    return SlurmHosts(nodes_of(cluster, allocated_nodes()), pythons)


def nodes_of(cluster: Cluster, allocated: Sequence[str]) -> dict[str, str]:
    """Return the node of each host: the one that the plan names, else the next unused one of the allocation.

    Raises:
        UsageError: the allocation has too few nodes for the hosts of the plan.
    """
    pinned = {host.node for host in cluster.hosts}
    free = [node for node in allocated if node not in pinned]
    open_hosts = [host.name for host in cluster.hosts if not host.node]
    if len(free) < len(open_hosts):
        wanted = len(cluster.hosts)
        raise UsageError(
            f"the plan has {counted(wanted, 'host')}, but this allocation only has the nodes {', '.join(allocated)}: "
            f"ask for {counted(wanted, 'node')} (--nodes)"
        )
    found = dict(zip(open_hosts, free, strict=False))
    return {host.name: host.node or found[host.name] for host in cluster.hosts}
