"""Reads the real hosts of a sweep: the plan's [cluster] and [[hosts]] (docs/tutorial/lab-servers.md)."""

from __future__ import annotations

import difflib
import ipaddress
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ringtap.core.toml_tables import TomlTable
from ringtap.core.units import format_rate, parse_load

REACHES = ("ssh", "slurm", "local")
OPT_IN = "i_may_load_these_links"
MIN_PORTS = 4
# torchrun would set these for each rank; ringtap sets them instead
OWN_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


@dataclass(frozen=True)
class ClusterHost:
    """A host of a cluster; empty values are determined on the host.

    Attributes:
        name: in the plan and in the run.
        ssh: the host as ssh(1) takes it, where hosts are reached by ssh.
        node: node of the Slurm allocation; empty: any.
        training: address of the training traffic.
        cross: address of the cross traffic.
        interface: interface of the training traffic.
        python: interpreter that has ringtap; empty: by the path of the one that runs the sweep.
        job_python: interpreter of the training job, for ``{python}`` in a model's command; empty: ``python``.
        ranks: ranks of the training job on it, if it trains.
        gpus: GPUs that its ranks see (CUDA_VISIBLE_DEVICES); empty: all.
        environment: variables of the job on this host beside those of the cluster and of the model.
        workdir: folder for the run's files on a host that is reached by ssh; empty: ``/tmp/ringtap-<user>``.
    """

    name: str
    ssh: str
    node: str
    training: str
    cross: str
    interface: str
    python: str
    workdir: str
    job_python: str = ""
    ranks: int = 1
    gpus: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Cluster:
    """The hosts that a sweep runs on, and their roles.

    Attributes:
        reach: ``ssh``, ``slurm`` (the allocation that the sweep runs in) or ``local``.
        hosts: the hosts.
        workers: names of the hosts that train, rank 0 first.
        cross_from: host that sends cross traffic; empty where the plan has none.
        cross_to: host that receives it, likewise.
        may_load: whether the user says that these links may be loaded.
        most_load_bps: upper limit of the cross traffic; 0 where the plan has none.
        ports: first and last TCP port that ringtap may listen on; None: any that is free.
        environment: variables of the job on every host.
        servers: names of the hosts of parameter servers.
    """

    reach: str
    hosts: tuple[ClusterHost, ...]
    workers: tuple[str, ...]
    cross_from: str
    cross_to: str
    may_load: bool
    most_load_bps: int
    ports: tuple[int, int] | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    servers: tuple[str, ...] = ()

    def host(self, name: str) -> ClusterHost:
        """Return a host by its name."""
        return next(host for host in self.hosts if host.name == name)

    def ranks(self, workers: Sequence[str]) -> int:
        """Return the number of ranks of a job on some hosts."""
        return sum(self.host(name).ranks for name in workers)

    def to_json(self) -> dict[str, Any]:
        """Return the cluster as JSON data; ``hosts`` lists names, as for a testbed."""
        names = [host.name for host in self.hosts]
        return asdict(self) | {"hosts": names, "machines": [asdict(host) for host in self.hosts]}


def read_most_load(table: TomlTable, capacity_bps: float) -> int:
    """Return the limit of the cross traffic in bit/s; 0 if [cluster] gives none."""
    return int(table.quantity("most_load", "0bit", lambda text: parse_load(text, capacity_bps).bps))


def read_cluster(
    table: TomlTable, hosts: Sequence[TomlTable], asked_bps: int, capacity_bps: float, job_workers: tuple[str, ...] = ()
) -> Cluster:
    """Read and check [cluster] and [[hosts]].

    Args:
        table: the plan's [cluster].
        hosts: its [[hosts]].
        asked_bps: the most that any step of the plan sends at a time; 0 for a plan without cross traffic.
        capacity_bps: capacity of the links, of which a most_load may be a share.
        job_workers: workers of a plan of jobs, whose [cluster] names no roles; empty for other plans.

    Raises:
        UsageError: a wrong key or value, with its line; cross traffic that the plan does not permit.
    """
    reach = table.text("reach", ..., REACHES)
    if not hosts:
        table.fail("reach", "has no hosts to reach: list each with its addresses under [[hosts]]")
    found = tuple(_host(one, reach) for one in hosts)
    names = [host.name for host in found]
    for number, one in enumerate(hosts):
        for key in ("name", "training", "node"):
            value = getattr(found[number], key)
            if value and value in (getattr(host, key) for host in found[:number]):
                one.fail(key, f"= {value!r} is that of a host above, too")
    workers, servers = table.texts("workers", list(job_workers) or ...), table.texts("servers", [])
    cross_from, cross_to = table.text("cross_from", ""), table.text("cross_to", "")
    may_load = bool(table.take(OPT_IN, bool, False, lambda _: True, "true or false"))
    most_load_bps = read_most_load(table, capacity_bps)
    ports, environment = _ports(table), table.variables("environment", OWN_VARIABLES)
    table.finish()
    if not workers:
        table.fail("workers", "is empty: name at least one host that trains")
    if len(set(workers)) != len(workers):
        table.fail("workers", "names a host twice: for several ranks on one host give it ranks = 2 under [[hosts]]")
    check_roles(table, (workers, servers, cross_from, cross_to), names, "a [[hosts]] entry")
    if asked_bps and reach == "local":
        table.fail(
            "reach", '= "local" has no link that cross traffic could load: plan loads = [0], or take a [testbed]'
        )
    if asked_bps:
        _check_cross_traffic(table, (cross_from, cross_to), may_load, (most_load_bps, asked_bps))
    return Cluster(reach, found, workers, cross_from, cross_to, may_load, most_load_bps, ports, environment, servers)


def check_roles(
    table: TomlTable, roles: tuple[Sequence[str], Sequence[str], str, str], names: Sequence[str], known_as: str
) -> None:
    """Refuse roles of hosts that the plan lacks, and hosts with a role twice.

    Args:
        table: the table of the keys ``workers``, ``servers``, ``cross_from`` and ``cross_to``.
        roles: their values.
        names: the hosts.
        known_as: what each of these is.
    """
    workers, servers, cross_from, cross_to = roles
    for key, hosts in (("workers", workers), ("servers", servers)):
        if len(set(hosts)) != len(hosts):
            table.fail(key, "names a host twice")
    for key, hosts in (
        ("workers", workers),
        ("servers", servers),
        ("cross_from", [cross_from]),
        ("cross_to", [cross_to]),
    ):
        for name in hosts:
            if name and name not in names:
                table.fail(key, unknown_host(name, names, known_as))


def unknown_host(name: str, names: Sequence[str], known_as: str = "a [[hosts]] entry") -> str:
    """Return the problem of a key that names a host which is not among those of the plan."""
    near = difflib.get_close_matches(name, names, 1)
    hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(names)}"
    return f"names {name!r}, which is not {known_as}; {hint}"


def _ports(table: TomlTable) -> tuple[int, int] | None:
    text = table.text("ports", "")
    if not text:
        return None
    match = re.fullmatch(r"(\d{1,5})-(\d{1,5})", text)
    if not match or not 1024 <= int(match[1]) <= int(match[2]) - MIN_PORTS + 1 <= 65536 - MIN_PORTS:
        table.fail("ports", f'= {text!r} is not a range of {MIN_PORTS} ports at least, such as "20000-20100"')
    return int(match[1]), int(match[2])


def _check_cross_traffic(table: TomlTable, pair: tuple[str, str], may_load: bool, rates_bps: tuple[int, int]) -> None:
    """Refuse cross traffic that the plan does not permit, exceeds its limit, or has no two hosts."""
    most_bps, asked_bps = rates_bps
    if not may_load:
        table.fail(
            OPT_IN,
            "is not true, but the plan's loads send cross traffic: others may use these links, so say "
            f"{OPT_IN} = true if you may load them, or plan loads = [0]",
        )
    if not most_bps:
        table.fail("most_load", 'is missing: say what the cross traffic may come to at most, for example "5gbit"')
    if asked_bps > most_bps:
        table.fail(
            "most_load",
            f"= {format_rate(most_bps)} is less than the plan's cross traffic asks for ({format_rate(asked_bps)}): "
            "lower the loads (within bursts they count burst.height times), or raise it",
        )
    for key, name in zip(("cross_from", "cross_to"), pair, strict=True):
        if not name:
            table.fail(key, "is missing: name the host")
    if pair[0] == pair[1]:
        table.fail("cross_to", "is the sender of the cross traffic itself")


def _host(table: TomlTable, reach: str) -> ClusterHost:
    name = table.text("name", ...)
    if not _NAME.fullmatch(name):
        table.fail("name", f"= {name!r} is not a plain name (letters, digits, dot, dash)")
    for key, only in (("ssh", "ssh"), ("workdir", "ssh"), ("node", "slurm")):
        if table.has(key) and reach != only:
            table.fail(key, f'is for reach = "{only}"; this plan\'s is "{reach}"')
    interface = table.text("interface", "")
    if not table.has("training") and not (reach == "slurm" and interface):
        instead = ' (or the "interface" that has it)' if reach == "slurm" else ""
        table.fail("training", f"is missing: give the address of the training traffic{instead}")
    training = _address(table, "training")
    rule = "a list of GPUs, such as [0, 1]"
    gpus = tuple(map(str, table.take("gpus", list, [], lambda value: all(map(_is_gpu, value)), rule)))
    host = ClusterHost(
        name=name,
        ssh=table.text("ssh", name if reach == "ssh" else ""),
        node=table.text("node", ""),
        training=training,
        cross=_address(table, "cross") or training,
        interface=interface,
        python=table.text("python", ""),
        workdir=table.text("workdir", ""),
        job_python=table.text("job_python", ""),
        ranks=table.integer("ranks", len(gpus) or 1, 1, 1024),
        gpus=gpus,
        environment=table.variables("environment", (*OWN_VARIABLES, *(["CUDA_VISIBLE_DEVICES"] if gpus else []))),
    )
    if host.workdir and not host.workdir.startswith("/"):
        table.fail("workdir", f"= {host.workdir!r} is not an absolute path")
    if host.ssh.startswith("-"):
        table.fail("ssh", f"= {host.ssh!r} would be an option to ssh, not a host")
    table.finish()
    return host


def _is_gpu(value: Any) -> bool:
    """Return True for an index, or a UUID or MIG name as nvidia-smi lists it."""
    if isinstance(value, str):
        return bool(re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9/-]*", value))
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _address(table: TomlTable, key: str) -> str:
    text = table.text(key, "")
    try:
        return str(ipaddress.IPv4Address(text)) if text else ""
    except ValueError:
        table.fail(key, f"= {text!r} is not an IPv4 address")
