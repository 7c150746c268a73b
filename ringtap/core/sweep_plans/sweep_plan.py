"""Reads the sweep plan from TOML, checks and resolves it (docs/reference/plan.md)."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from os import PathLike
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

from ringtap.core.errors import UsageError
from ringtap.core.installation import shipped_example
from ringtap.core.sweep_plans.cluster_hosts import (
    OPT_IN,
    Cluster,
    check_roles,
    read_cluster,
    read_most_load,
    unknown_host,
)
from ringtap.core.sweep_plans.collective_algorithms import Collectives, check_places, read_collectives
from ringtap.core.sweep_plans.jobs_that_share import (
    CONGESTION_CONTROL,
    MAX_JOBS,
    MIN_JOBS,
    RULES,
    SharingJob,
    check_hosts,
    check_rules,
    check_shifts,
    over_tcp,
    read_begin,
    read_job,
    read_offsets,
)
from ringtap.core.sweep_plans.training_jobs import SCALE_MODEL, Model, read_model
from ringtap.core.testbed_options import LIMITS, TOPOLOGY_OF, LinkOptions
from ringtap.core.toml_tables import PlanTables, TomlTable
from ringtap.core.training_transports import contradiction, is_rdma
from ringtap.core.units import format_rate, is_share, parse_duration_s, parse_load, parse_rate_bps, parse_size_bytes

CUSTOM = "custom"  # configuration of a testbed that names its hosts and roles
THESIS_HOSTS = ("S0", "S1", "S2", "S3")  # of the configurations of the thesis, A and B
TRAFFIC_KINDS = ("iperf", "consistent", "burst")
AUTO = "auto"  # value of a key that the measurement is to choose
# loads of the first pass with loads = "auto", as shares of the capacity
_FIRST_LOADS, _HEAVIEST_LOAD, _LEAST_HEAVIEST_LOAD = 4, 0.88, 0.1


@dataclass(frozen=True)
class Testbed(LinkOptions):
    """The testbed that a sweep builds; rates are those of the links as built (scaled).

    ``servers`` are the hosts of parameter servers, beyond ``hosts`` for a configuration of the thesis.
    """

    configuration: str
    hosts: tuple[str, ...] = ()
    workers: tuple[str, ...] = ()
    cross_from: str = ""
    cross_to: str = ""
    servers: tuple[str, ...] = ()

    @property
    def every_host(self) -> tuple[str, ...]:
        """Names of all hosts, in the order of their addresses."""
        if self.configuration == CUSTOM:
            return self.hosts
        return (*THESIS_HOSTS, *(host for host in self.servers if host not in THESIS_HOSTS))

    def ranks(self, workers: Sequence[str]) -> int:
        """Return the number of ranks of a job on some hosts, which have one each."""
        return len(workers)

    def to_json(self) -> dict[str, Any]:
        """Return the testbed as JSON data."""
        return asdict(self)


@dataclass(frozen=True)
class Window:
    """Conditions under which a point counts as measured.

    Attributes:
        warmup_iterations: iterations of a new job that are left out.
        settle_s: seconds after each load step that are left out.
        min_s: minimum length of the window.
        min_iterations: minimum number of iterations in it.
        max_s: length at which it ends even with fewer iterations.
        retries: number of times that a disturbed window is measured again.
        start_timeout_s: seconds that a job may take to its first iteration.
    """

    warmup_iterations: int = 5
    settle_s: float = 3.0
    min_s: float = 10.0
    min_iterations: int = 20
    max_s: float = 30.0
    retries: int = 2
    start_timeout_s: float = 120.0


@dataclass(frozen=True)
class Burst:
    """Shape of burst traffic (Algorithm 2).

    Attributes:
        height: rate in a burst as a multiple of the load.
        length_s: length of a burst.
        period_s: time from one burst to the next.
        quiet_budget: the bytes between bursts are exact in ``each`` period, or in all of them ``together``.
    """

    height: float = 3.0
    length_s: float = 0.001
    period_s: float = 0.01
    quiet_budget: str = "together"


@dataclass(frozen=True)
class AutoLoads:
    """Aims of a sweep that chooses its loads.

    Attributes:
        target_interval_gbps: half-width of the 95 % interval of the congestion point, at full size, at which a series
            is known well enough.
        target_mean: standard error of each mean iteration time at which it is known well enough, as a share of it.
        budget_s: longest measured time of each series, settling included.
    """

    target_interval_gbps: float
    target_mean: float
    budget_s: float


@dataclass(frozen=True)
class Capture:
    """Recording of packets at some loads, after the window of each.

    Attributes:
        loads: the loads.
        iterations: whole iterations to record.
        max_bytes: size on each host's disk at which the recording of a load ends early.
    """

    loads: tuple[float, ...]
    iterations: int = 10
    max_bytes: int = 1_000_000_000


@dataclass(frozen=True, kw_only=True)
class CommonPlan:
    """Part that every plan of a sweep has: name, sizes, hosts and windows.

    Attributes:
        name: slug of the sweep.
        seed: seed of everything random.
        scale: factor by which jobs, flows and links are smaller than full size.
        capacity_bps: rate of the links as built.
        topology: the testbed to build, the first one if there are several, or the cluster to use.
        window: conditions under which a point counts as measured.
    """

    name: str
    seed: int
    scale: float
    capacity_bps: int
    topology: Testbed | Cluster
    window: Window = field(default_factory=Window)

    def to_json(self) -> dict[str, Any]:
        """Return the plan as JSON data (docs/reference/run-directory.md); keys of other kinds of plans have nothing."""
        return _NOTHING | asdict(self) | {"topology": self.topology.to_json()}


@dataclass(frozen=True, kw_only=True)
class LoadPlan(CommonPlan):
    """A sweep of models x traffic kinds x loads.

    Attributes:
        loads: requested cross traffic as shares of the capacity; 0 is the point without it. Repeats are replicates. If
            the sweep chooses its loads, these are those of the first pass, and the last one is the heaviest.
        random_order: True if each series takes its loads in random order.
        models: the training jobs.
        traffic: kinds of cross traffic.
        iperf_streams: parallel streams of the iperf kind; None: each load takes as many as it needs.
        burst: shape of the burst kind.
        auto: aims by which the sweep chooses further loads; None: the loads are all there are.
        capture: packets to record; None: none.
        collectives: how the jobs exchange their gradients.
    """

    loads: tuple[float, ...]
    random_order: bool
    models: tuple[Model, ...]
    traffic: tuple[str, ...]
    iperf_streams: int | None
    burst: Burst = field(default_factory=Burst)
    auto: AutoLoads | None = None
    capture: Capture | None = None
    collectives: Collectives = field(default_factory=Collectives)

    @property
    def every_model(self) -> tuple[Model, ...]:
        """The models."""
        return self.models

    @property
    def heaviest_load(self) -> float:
        """The highest of the loads."""
        return max(self.loads)

    def models_on(self, host: str) -> dict[str, Model]:
        """Return the models, by label, if the host is a worker."""
        return {model.label: model for model in self.models} if host in self.topology.workers else {}

    def parts(self) -> list[LoadPlan]:
        """Return a plan per topology, with its models; the keys of other topologies have their defaults."""
        topologies = list(dict.fromkeys(model.topology for model in self.models))
        if isinstance(self.topology, Cluster) or not any(topologies):
            return [self]
        found = []
        for name in topologies:
            foreign = {key: getattr(_PLAIN, key) for key, kind in TOPOLOGY_OF.items() if kind != name}
            models = tuple(model for model in self.models if model.topology == name)
            found.append(replace(self, models=models, topology=replace(self.topology, topology=name, **foreign)))
        return found


@dataclass(frozen=True, kw_only=True)
class SharingPlan(CommonPlan):
    """A sweep of jobs that share links.

    Attributes:
        jobs: the jobs.
        offsets: how they run together, one point each: a name of
            `ringtap.core.sweep_plans.jobs_that_share`, or the shift of each job in s.
        begin: shift of each job in s, or `ringtap.core.sweep_plans.jobs_that_share.WORST`, at which free
            jobs are held until the rule begins; empty: they are not held.
    """

    jobs: tuple[SharingJob, ...]
    offsets: tuple[str | tuple[float, ...], ...]
    begin: str | tuple[float, ...] = ""

    heaviest_load = 0.0  # without cross traffic

    @property
    def every_model(self) -> tuple[Model, ...]:
        """The models of the jobs."""
        return tuple(job.model for job in self.jobs)

    def models_on(self, host: str) -> dict[str, Model]:
        """Return the models of the jobs on a host, by the names of the jobs."""
        return {job.name: job.model for job in self.jobs if host in job.workers}


SweepPlan: TypeAlias = LoadPlan | SharingPlan

# keys of each kind of plan, which readers of run.json find in all of them
_NOTHING: dict[str, Any] = {"loads": (0.0,), "random_order": False, "models": (), "traffic": (), "iperf_streams": None}
_NOTHING |= {"burst": asdict(Burst()), "auto": None, "capture": None, "collectives": asdict(Collectives())}
_NOTHING |= {"jobs": (), "offsets": (), "begin": ""}
_PLAIN = Testbed("B")
_SINGLE, _REPEATED = {"sweep", "testbed", "cluster", "window", "burst", "capture"}, {"models", "hosts", "jobs"}


def plan_from_keys(keys: Mapping[str, Any]) -> SweepPlan:
    """Check a plan from keyword arguments, with the defaults of a file.

    Args:
        keys: keys of [sweep], such as ``loads``, and other tables by name: ``models`` is a list of names and dicts,
            ``hosts`` a list of dicts, ``testbed``, ``cluster``, ``window`` and ``burst`` are dicts; ``capture`` is the
            list of loads, or a dict with these as ``loads`` and the keys of [capture].

    Raises:
        UsageError: a key or value is wrong.
    """
    tables = {name: value for name, value in keys.items() if name in _SINGLE | _REPEATED}
    models = keys.get("models")
    if isinstance(models, str):
        raise UsageError(f"models is {models!r}: give a list, such as [{models!r}]")
    if isinstance(models, (list, tuple)):
        tables["models"] = [{"name": model} if isinstance(model, str) else model for model in models]
    if not isinstance(capture := keys.get("capture"), Mapping):
        tables.pop("capture", None)
    sweep = {name: value for name, value in keys.items() if name not in tables}
    if isinstance(capture, Mapping) and "loads" in capture:
        sweep["capture"] = capture["loads"]
        tables["capture"] = {name: value for name, value in capture.items() if name != "loads"}
    return load_plan({"sweep": sweep} | tables)


def load_plan(source: str | PathLike[str] | Mapping[str, Any]) -> SweepPlan:
    """Read and check a plan; examples/NAME is the example that ships with ringtap, unless there is one here.

    Args:
        source: a plan file, or a dict of its tables, in which rates, sizes and times may be numbers of bit/s, bytes
            and seconds.

    Raises:
        UsageError: the file cannot be read, is not TOML, or has a wrong key or value (the message names its line).
    """
    if not isinstance(source, (str, PathLike, Mapping)):
        raise UsageError(f"{source!r} is not a plan: give the path of a file, or a dict of its tables")
    if not isinstance(source, Mapping):
        source = shipped_example(source) or Path(source)
    file = PlanTables(source, _SINGLE, _REPEATED)
    if file.has("jobs"):
        return _plan_of_jobs(file)
    sweep, is_real = file.one("sweep", needed=True), file.has("cluster")
    if is_real and file.has("testbed"):
        raise UsageError(f"{file.one('testbed').where()}: a plan has a [testbed] or a [cluster]: take one of them out")
    if file.has("hosts") and not is_real:
        raise UsageError(f"{file.each('hosts')[0].where()}: [[hosts]] needs a [cluster], which says who does what")
    scale = sweep.number("scale", 1.0 if is_real else 100.0, 1, 100_000)
    collectives = read_collectives(sweep)
    given = [read_model(one, scale, collectives) for one in file.each("models", needed=True)]
    topologies = () if is_real else _topologies(file.one("testbed"))
    models = tuple(
        replace(model, collective=name, topology=topology)
        for topology in (topologies if len(topologies) > 1 else ("",))
        for model in given
        for name in collectives.names or ("",)
    )
    burst = _burst(file.one("burst"))
    traffic = _traffic(sweep)
    _check_models(file, models, traffic)
    full_bps = sweep.quantity("capacity", ... if is_real else "25gbit", parse_rate_bps)
    capacity_bps = round(full_bps if is_real else full_bps / scale)  # a real link is not scaled
    most_bps = read_most_load(file.one("cluster"), full_bps) if is_real else 0
    most = most_bps / capacity_bps / (burst.height if "burst" in traffic else 1.0) if most_bps else 1.0
    loads = _loads(sweep, full_bps, most)
    auto, window = _auto(sweep, is_real), _window(file.one("window"), is_auto=sweep.is_text("loads"))
    if auto and auto.budget_s < len(loads) * (window.settle_s + window.min_s):
        sweep.fail("budget", f"= {auto.budget_s:g} s is too short for the first pass of {len(loads)} loads")
    # within a burst the load is higher, up to the capacity
    peak = min(max(loads) * (burst.height if "burst" in traffic else 1.0), 1.0)
    plan = LoadPlan(
        name=sweep.text("name", "sweep"),
        seed=sweep.integer("seed", 1, 0, 2**31),
        scale=scale,
        capacity_bps=capacity_bps,
        loads=loads,
        random_order=sweep.text("order", "as-written", ("as-written", "random")) == "random",
        models=models,
        traffic=traffic,
        iperf_streams=_iperf_streams(sweep),
        topology=(
            read_cluster(file.one("cluster"), file.each("hosts"), round(peak * capacity_bps), full_bps)
            if is_real
            else _testbed(file.one("testbed"))
        ),
        window=window,
        burst=burst,
        auto=auto,
        capture=_capture(sweep, file.one("capture"), loads, full_bps),
        collectives=collectives,
    )
    _check_testbeds(file, plan)
    for topology in topologies or ("",):
        check_places(sweep, collectives.names, plan.topology.servers, topology)
    if len(topologies) > 1 and plan.capture:
        sweep.fail("capture", "goes with one topology: a plan of several does not say where packets pass")
    sweep.finish()
    real = plan.topology if isinstance(plan.topology, Cluster) else None
    _check_transports(file, plan)
    _check_job_python(file, plan)
    uneven = real and len({real.host(name).ranks for name in real.workers}) > 1
    if uneven and any(model.framework == "horovod" for model in models):
        raise UsageError(f'{file.name}: framework = "horovod" needs the same number of ranks on every worker')
    return plan


def _plan_of_jobs(file: PlanTables) -> SharingPlan:
    is_real = file.has("cluster")
    for name in ("models", "burst", "capture", "testbed" if is_real else "hosts"):
        if file.has(name):
            others = "[cluster]" if name == "testbed" else "[[jobs]]"
            hint = "add [cluster], which says how to reach them" if name == "hosts" else "take it out"
            raise UsageError(f"{file.name}: a plan with {others} has no [{name}]: {hint}")
    sweep = file.one("sweep", needed=True)
    scale = sweep.number("scale", 1.0 if is_real else 100.0, 1, 100_000)
    tables = file.each("jobs", needed=True)
    if not MIN_JOBS <= len(tables) <= MAX_JOBS:
        raise UsageError(f"{file.name}: {len(tables)} [[jobs]]: give {MIN_JOBS} to {MAX_JOBS} that share a link")
    jobs = tuple(read_job(table, scale) for table in tables)
    names = [job.name for job in jobs]
    if twice := next((name for name in names if names.count(name) > 1), ""):
        raise UsageError(f"{file.name}: two jobs are named {twice}: give one another name")
    alone = next(
        (job for job in jobs if not any({*job.workers} & {*other.workers} for other in jobs if other is not job)), None
    )
    if alone and (is_real or _topologies(file.one("testbed")) == ("star",)):
        raise UsageError(f"{file.name}: {alone.name} has no host in common with another job, so they share no link")
    offsets = read_offsets(sweep, len(jobs))
    check_rules(tables, offsets)
    full_bps = sweep.quantity("capacity", ... if is_real else "25gbit", parse_rate_bps)
    begin = read_begin(sweep, len(jobs), offsets, is_real=is_real)
    topology: Testbed | Cluster
    if is_real:
        if rule := next((rule for rule in RULES if rule in offsets), ""):
            sweep.fail("offsets", f"holds {rule!r}, which is for the links of a [testbed]: leave it out on a [cluster]")
        jobs = tuple(map(over_tcp, jobs))
        topology = _cluster_of_jobs(file, tables, jobs, full_bps)
    else:
        topology = _testbed_of_jobs(file.one("testbed"), jobs)
        rules = [rule for rule in RULES if rule in offsets and rule != CONGESTION_CONTROL]
        if rules and topology.delay_s:
            sweep.fail("offsets", f"holds {rules[0]!r}, whose classes would take the place of the links' delay")
        exchanges_s = [
            job.model.exchange_s(topology.ranks(job.workers), scale, full_bps / scale, topology.mtu) for job in jobs
        ]
        for key, shifts_s in [*(("offsets", each) for each in offsets), ("begin", begin)]:
            if isinstance(shifts_s, tuple):
                check_shifts(sweep, key, jobs, shifts_s, exchanges_s)
    plan = SharingPlan(
        name=sweep.text("name", "sweep"),
        seed=sweep.integer("seed", 1, 0, 2**31),
        scale=scale,
        capacity_bps=round(full_bps if is_real else full_bps / scale),  # a real link is not scaled
        topology=topology,
        window=_window(file.one("window"), is_auto=False),
        jobs=jobs,
        offsets=offsets,
        begin=begin,
    )
    _check_testbeds(file, plan)
    sweep.finish()
    _check_job_python(file, plan)
    return plan


def _cluster_of_jobs(
    file: PlanTables, tables: Sequence[TomlTable], jobs: Sequence[SharingJob], capacity_bps: float
) -> Cluster:
    """Return the hosts that jobs run on, which all are workers."""
    table, hosts = file.one("cluster"), file.each("hosts")
    workers = tuple(dict.fromkeys(host for job in jobs for host in job.workers))
    for key in ("workers", "servers", "cross_from", "cross_to", OPT_IN, "most_load"):
        if table.has(key):
            table.fail(key, "is for [[models]]: [[jobs]] have their own workers and no cross traffic, so take it out")
    names = [host.text("name", ...) for host in hosts]
    for job_table, job in zip(tables, jobs, strict=True):
        if names and (strange := next((host for host in job.workers if host not in names), "")):
            job_table.fail("workers", unknown_host(strange, names))
    cluster = read_cluster(table, hosts, 0, capacity_bps, workers)
    if cluster.reach == "local":
        table.fail("reach", '= "local" has no link that jobs could share: use ssh or slurm, or a [testbed]')
    check_hosts(tables, jobs, cluster)
    return cluster


def _testbed_of_jobs(table: TomlTable, jobs: Sequence[SharingJob]) -> Testbed:
    """Return the testbed of jobs, whose hosts are by default those of the jobs."""
    workers = tuple(dict.fromkeys(host for job in jobs for host in job.workers))
    hosts = table.texts("hosts", list(workers))
    for host in workers:
        if host not in hosts:
            table.fail("hosts", f"lacks {host}, which is a worker of {next(j.name for j in jobs if host in j.workers)}")
    if len(topologies := _topologies(table)) > 1:
        table.fail("topology", "is a list: jobs share the links of one topology")
    if topologies != ("star",) and not table.has("hosts"):
        table.fail("hosts", f"is missing: in a {topologies[0]}, the place of a host follows from the order of all")
    testbed = Testbed(configuration=CUSTOM, hosts=hosts, workers=workers, **_shape(table), **_links(table))
    table.finish()
    _check_shape(table)
    return testbed


def _check_models(file: PlanTables, models: Sequence[Model], traffic: Sequence[str]) -> None:
    """Refuse models that could not be told apart, and different models of one name."""
    known: dict[str, Model] = {}
    for model in models:
        # the same job, whose variables and words may select its transport
        job = replace(
            model, transport="", collective="", topology="", environment={}, command=(), directory="", launch="ranks"
        )
        if model.label in [other.label for other in models if other is not model]:
            raise UsageError(
                f"{file.name}: two models have the same name, {model.label}: give each a transport of its own, such as "
                "tcp-a and tcp-b, or another name"
            )
        if known.setdefault(model.name, job) != job:
            raise UsageError(
                f"{file.name}: two models named {model.name} differ in more than their transport: give one another name"
            )
    names = [model.series(kind) for model in models for kind in dict.fromkeys(traffic)]
    if twice := next((name for name in names if names.count(name) > 1), ""):
        raise UsageError(f"{file.name}: two series have the name {twice}: rename a model")


def _check_job_python(file: PlanTables, plan: SweepPlan) -> None:
    """Refuse an interpreter for jobs that no command asks for."""
    if not any("{python}" in word for model in plan.every_model for word in model.command):
        for table in file.each("hosts"):
            if table.has("job_python"):
                table.fail(
                    "job_python",
                    "is for {python} in the command of a model, and none has it: "
                    'write command = ["{python}", "train.py"], or leave it out',
                )


def _check_transports(file: PlanTables, plan: LoadPlan) -> None:
    """Refuse transports that a job would not use."""
    cluster = plan.topology if isinstance(plan.topology, Cluster) else None
    hosts = {name: cluster.host(name).environment for name in cluster.workers} if cluster else {"": {}}
    for model in (model for model in plan.models if model.transport):
        where = f"{file.name}, model {model.label}"
        if is_rdma(model.transport) and cluster is None:
            raise UsageError(f"{where}: a testbed's links carry TCP only: measure RDMA on the hosts of a [cluster]")
        if is_rdma(model.transport) and model.job == SCALE_MODEL:
            raise UsageError(
                f"{where}: the scale model synchronises over gloo, which has TCP only: give the command of a job that "
                'uses NCCL, or job = "real" on hosts with GPUs'
            )
        if is_rdma(model.transport) and model.collective:
            raise UsageError(f"{where}: a plan's collective exchanges gradients over gloo, which has TCP only")
        for name, variables in hosts.items():
            if found := contradiction(model.transport, {**model.environment, **variables}):
                on = f" on {name}" if variables else ""
                raise UsageError(f"{where}: {found}{on} contradicts it: take the variable out, or change the transport")


def _shares(sweep: TomlTable, key: str, loads: Sequence[float | str], capacity_bps: float) -> tuple[float, ...]:
    """Return loads of a plan as shares of the capacity."""
    try:
        return tuple(parse_load(one, capacity_bps).share if isinstance(one, str) else float(one) for one in loads)
    except UsageError as error:
        sweep.fail(key, f"is not understood: {error}")


def _loads(sweep: TomlTable, capacity_bps: float, most: float) -> tuple[float, ...]:
    """Return the loads, or those of the first pass of a sweep that chooses its loads up to the share ``most``."""
    rule = f'a list of loads, such as 0.8, "80%" or "10gbit", or "{AUTO}"'
    loads = sweep.take(
        "loads",
        (list, str),
        ...,
        lambda value: value == AUTO or (isinstance(value, list) and bool(value) and all(map(_is_load, value))),
        rule,
    )
    if loads == AUTO:
        heaviest = math.floor(min(_HEAVIEST_LOAD, most) * 100) / 100
        if heaviest < _LEAST_HEAVIEST_LOAD:
            sweep.fail("loads", f'= "{AUTO}" needs a most_load of {_LEAST_HEAVIEST_LOAD:.0%} of the capacity at least')
        # evenly spaced in ln(C/(C-BW)), in which the curves bend evenly
        step = -math.log1p(-heaviest) / (_FIRST_LOADS - 1)
        return tuple(round(-math.expm1(-step * number), 2) for number in range(_FIRST_LOADS))
    shares = _shares(sweep, "loads", loads, capacity_bps)
    for load, share in zip(loads, shares, strict=True):
        if not 0 <= share < 1:
            why = "a load is a share of the capacity, from 0 to below 1"
            if isinstance(load, str) and not is_share(load):
                why = f"a load is below the capacity, which is {format_rate(capacity_bps)}"
            elif not isinstance(load, str) and 1 < load < 100:
                why += f'; did you mean {load / 100:g} or "{load:g}%"?'
            sweep.fail("loads", f"holds {load}: {why}")
    return shares


def _auto(sweep: TomlTable, is_real: bool) -> AutoLoads | None:
    """Return the aims of a sweep that chooses its loads; None if its loads are given."""
    if not sweep.is_text("loads"):
        for key in ("target_interval", "target_mean", "budget"):
            if sweep.has(key):
                sweep.fail(key, f'is for loads = "{AUTO}", and the loads of this plan are given')
        return None
    if sweep.has("order"):
        sweep.fail("order", f'has no meaning with loads = "{AUTO}": the measurement gives the order')
    if is_real and not sweep.has("budget"):
        sweep.fail(
            "budget",
            f'is missing: with loads = "{AUTO}" on a cluster, say how long each series may load its links at most, '
            'for example "20min"',
        )
    target_bps = sweep.quantity("target_interval", "1gbit", parse_rate_bps)
    auto = AutoLoads(
        target_interval_gbps=target_bps / 1e9,
        target_mean=sweep.number("target_mean", 0.05, 0.001, 1.0),
        budget_s=sweep.quantity("budget", "20min", parse_duration_s),
    )
    if not target_bps:
        sweep.fail("target_interval", "is 0: no measurement reaches it")
    return auto


def _capture(sweep: TomlTable, table: TomlTable, loads: tuple[float, ...], capacity_bps: float) -> Capture | None:
    given = sweep.take("capture", list, [], lambda value: all(map(_is_load, value)), "a list of loads of the plan")
    asked = _shares(sweep, "capture", given, capacity_bps)
    for load in asked:
        if load not in loads:
            nearest = min(loads, key=lambda one: abs(one - load))
            sweep.fail("capture", f"holds {load:g}, which is not among the loads; the nearest is {nearest:g}")
    capture = Capture(
        tuple(dict.fromkeys(asked)),
        table.integer("iterations", 10, 1, 100_000),
        int(table.quantity("max_bytes", "1GB", parse_size_bytes)),
    )
    table.finish()
    for key in ("iterations", "max_bytes"):
        if table.has(key) and not asked:
            table.fail(key, "needs loads to record packets at: add capture to [sweep]")
    return capture if asked else None


def _iperf_streams(sweep: TomlTable) -> int | None:
    rule = f'a whole number from 1 to 64, or "{AUTO}"'
    streams = sweep.take(
        "iperf_streams",
        (int, str),
        2,
        lambda value: value == AUTO or (isinstance(value, int) and 1 <= value <= 64),
        rule,
    )
    return None if streams == AUTO else int(streams)


def _traffic(sweep: TomlTable) -> tuple[str, ...]:
    traffic = sweep.texts("traffic", ["iperf", "consistent"])
    for kind in traffic:
        if kind not in TRAFFIC_KINDS:
            near = difflib.get_close_matches(kind, TRAFFIC_KINDS, 1)
            hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(TRAFFIC_KINDS)}"
            sweep.fail("traffic", f"holds {kind!r}; {hint}")
    return traffic


def _is_load(value: Any) -> bool:
    return isinstance(value, (int, float, str)) and not isinstance(value, bool)


def _testbed(table: TomlTable) -> Testbed:
    testbed = Testbed(
        configuration=table.text("configuration", "B", ("A", "B", CUSTOM)),
        hosts=table.texts("hosts", []),
        workers=table.texts("workers", []),
        cross_from=table.text("cross_from", ""),
        cross_to=table.text("cross_to", ""),
        servers=table.texts("servers", []),
        **_shape(table),
        **_links(table),
    )
    table.finish()
    _check_shape(table)
    own = (testbed.hosts, testbed.workers, testbed.cross_from, testbed.cross_to)
    if testbed.configuration != CUSTOM and any(own):
        table.fail(
            "configuration", f'= {testbed.configuration!r} brings its own hosts and roles; use "custom" to name them'
        )
    if testbed.configuration == CUSTOM and not all(own):
        table.fail("configuration", '= "custom" needs hosts, workers, cross_from and cross_to')
    roles = (testbed.workers, testbed.servers, testbed.cross_from, testbed.cross_to)
    check_roles(table, roles, testbed.every_host, "one of its hosts")
    if testbed.cross_to and testbed.cross_from == testbed.cross_to:
        table.fail("cross_to", "is the sender of the cross traffic itself")
    return testbed


def _check_testbeds(file: PlanTables, plan: SweepPlan) -> None:
    """Refuse testbeds that cannot be built."""

    def refuse(key: str, why: str) -> NoReturn:
        if key == "rate":
            file.one("sweep").fail("capacity", why)
        has_own_hosts = file.has("jobs") or file.one("testbed").has("hosts")
        file.one("testbed").fail("servers" if key == "hosts" and not has_own_hosts else key, why)

    for part in plan.parts() if isinstance(plan, LoadPlan) else (plan,):
        if isinstance(testbed := part.topology, Testbed):
            testbed.check(testbed.every_host, testbed.host_rate_bps(plan.capacity_bps), refuse)


def _topologies(table: TomlTable) -> tuple[str, ...]:
    """Return the topologies of a testbed, which are measured one after the other."""
    star = LinkOptions.topology
    given = table.texts("topology", [star]) if not table.is_text("topology") else (table.text("topology", star),)
    if not given or len(set(given)) < len(given):
        table.fail("topology", "must be a topology, or a list of different ones")
    return given


def _shape(table: TomlTable) -> dict[str, Any]:
    """Return the first topology of a testbed, and the keys of its shape."""
    return {
        "topology": _topologies(table)[0],
        "per_leaf": table.integer("per_leaf", LinkOptions.per_leaf, *LIMITS["per_leaf"]),
        "spines": table.integer("spines", LinkOptions.spines, *LIMITS["spines"]),
        "oversubscription": table.number("oversubscription", LinkOptions.oversubscription, *LIMITS["oversubscription"]),
        "sides": table.text("sides", LinkOptions.sides),
    }


def _check_shape(table: TomlTable) -> None:
    """Refuse keys of topologies that a testbed does not have."""
    topologies = _topologies(table)
    for key, kind in TOPOLOGY_OF.items():
        if table.has(key) and kind not in topologies:
            table.fail(key, f'is for topology = "{kind}"')


def _links(table: TomlTable) -> dict[str, Any]:
    return {
        "queue_bytes": int(table.quantity("queue", f"{LinkOptions.queue_bytes}B", parse_size_bytes)),
        "burst_bytes": int(table.quantity("burst", f"{LinkOptions.burst_bytes}B", parse_size_bytes)),
        "mtu": table.integer("mtu", LinkOptions.mtu, *LIMITS["mtu"]),
        "congestion_control": table.text("congestion_control", LinkOptions.congestion_control),
        "offload_segments": table.integer(
            "offload_segments", LinkOptions.offload_segments, *LIMITS["offload_segments"]
        ),
        "delay_s": table.quantity("delay", f"{LinkOptions.delay_s:g}s", parse_duration_s),
    }


def _window(table: TomlTable, *, is_auto: bool) -> Window:
    min_time, min_iterations, max_time = ("4s", 10, "10s") if is_auto else ("10s", 20, "30s")
    window = Window(
        warmup_iterations=table.integer("warmup_iterations", 5, 0, 10_000),
        settle_s=table.quantity("settle", "3s", parse_duration_s),
        min_s=table.quantity("min_time", min_time, parse_duration_s),
        min_iterations=table.integer("min_iterations", min_iterations, 2, 1_000_000),
        max_s=table.quantity("max_time", max_time, parse_duration_s),
        retries=table.integer("retries", 2, 0, 100),
        start_timeout_s=table.quantity("start_timeout", "120s", parse_duration_s),
    )
    table.finish()
    if window.max_s < window.min_s:
        table.fail("max_time", f"= {window.max_s:g} s is below min_time = {window.min_s:g} s")
    return window


def _burst(table: TomlTable) -> Burst:
    burst = Burst(
        height=table.number("height", 3.0, 1.0, 1000.0),
        length_s=table.quantity("length", "1ms", parse_duration_s),
        period_s=table.quantity("period", "10ms", parse_duration_s),
        quiet_budget=table.text("quiet_budget", "together", ("each", "together")),
    )
    table.finish()
    if not 0 < burst.height * burst.length_s < burst.period_s:
        table.fail(
            "length",
            f"= {burst.length_s:g} s at {burst.height:g} times the load carries no less than the whole period of "
            f"{burst.period_s:g} s",
        )
    return burst
