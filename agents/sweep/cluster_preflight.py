"""Checks a cluster before a sweep: queries facts about each host, reports all problems, and derives the roles."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from ringtap.agents.hosts import Hosts, understood
from ringtap.agents.sweep.host_roles import Attachment, SweepRoles
from ringtap.agents.sweep.job_launch_commands import filled, job_python, on_this_machine, own_environment
from ringtap.agents.sweep.sweep_estimate import layout, room_bytes
from ringtap.agents.testbed.topology import Roles
from ringtap.core.errors import MeasurementError, UsageError, last_line
from ringtap.core.isolated_python import LEAVE_FOLDER_OUT, python_command
from ringtap.core.link_counter_sources import ETHTOOL, INFINIBAND, nic_counter, source_of
from ringtap.core.parent_death import run_helper
from ringtap.core.run_directory_schema import ACKNOWLEDGED
from ringtap.core.secret_masking import mask_variables, mask_words
from ringtap.core.sweep_plans.cluster_hosts import Cluster, ClusterHost
from ringtap.core.sweep_plans.jobs_that_share import gpus_of, sharing
from ringtap.core.sweep_plans.sweep_plan import CUSTOM, LoadPlan, SharingPlan, SweepPlan
from ringtap.core.sweep_plans.training_jobs import PLACEHOLDERS, REAL, SCALE_MODEL, Model
from ringtap.core.thesis_neural_networks import PROFILES
from ringtap.core.training_transports import is_rdma
from ringtap.core.units import counted

# the workers' clocks set the windows, and the receiver's clock selects its counters in them; their difference must be
# small compared with the settling time
MAX_CLOCK_DIFFERENCE_S = 0.2
_ANSWER_S = 100.0  # the first answer waits for the connection, which has a time limit of its own
_AT_ONCE = 8
_ROOM_LEFT_BYTES = 1_000_000  # with less, a host may fail to write its messages


@dataclass(frozen=True)
class HostAnswer:
    """Answer of a host.

    Attributes:
        host: name of the host.
        facts: the result of `ringtap.agents.sweep.host_facts`; empty if there was no usable answer.
        problems: reasons that the sweep cannot run on the host, one sentence each.
    """

    host: str
    facts: dict[str, Any]
    problems: tuple[str, ...]


def ask_hosts(plan: SweepPlan, hosts: Hosts) -> list[HostAnswer]:
    """Query all hosts of a plan's cluster, eight at a time; return the answers in the plan's order."""
    cluster = plan.topology
    assert isinstance(cluster, Cluster)
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        answers = list(pool.map(lambda host: _ask_host(plan, host, hosts), cluster.hosts))
    pythons = {host.name: job_python(plan, host.name, hosts) for host in cluster.hosts}
    return [replace(item, problems=(*item.problems, *_torch_problems(item, answers, pythons))) for item in answers]


def _question(plan: SweepPlan, host: ClusterHost, hosts: Hosts) -> dict[str, Any]:
    """Return the question to `ringtap.agents.sweep.host_facts` on a host."""
    cluster = plan.topology
    assert isinstance(cluster, Cluster)
    python = job_python(plan, host.name, hosts)
    question: dict[str, Any] = {"jobs": _jobs_question(plan, plan.models_on(host.name), host.name, python)}
    if cluster.reach == "ssh":
        question["room"] = {"folder": host.workdir, "bytes": room_bytes(plan)}
    return question


def _jobs_question(plan: SweepPlan, models: Mapping[str, Model], host: str, python: str) -> dict[str, Any]:
    """Return what a host is asked about the models that have commands, by label."""
    found = {}
    for label, model in models.items():
        if model.command:
            values = dict.fromkeys(PLACEHOLDERS, "0") | {"python": python, "host": host}
            words = model.command if isinstance(plan.topology, Cluster) else tuple(on_this_machine(model))
            # without secrets, as every user of the host can read the arguments of a process
            variables = mask_variables(own_environment(plan, model, host))
            command = mask_words(filled(words, values))
            found[label] = {"command": command, "directory": model.directory, "environment": variables}
    return found


def _jobs_problems(facts: Mapping[str, Any], where: str) -> list[str]:
    return [f"{where}model {name}: {each}" for name, found in facts["jobs"].items() for each in found["problems"]]


def local_job_problems(plan: SweepPlan) -> list[str]:
    """Return why jobs cannot run on a plan's testbed: its hosts have this machine's folders, programs and scripts."""
    names = [job.name for job in plan.jobs] if isinstance(plan, SharingPlan) else [one.label for one in plan.models]
    models = dict(zip(names, plan.every_model, strict=True))
    jobs = _jobs_question(plan, models, layout(plan)[1].workers[0], sys.executable)
    if not jobs:
        return []
    # in a process of its own, as it changes the folder and the variables
    command = python_command(sys.executable, "ringtap.agents.sweep.host_facts", json.dumps({"jobs": jobs}))
    done = run_helper(command, _ANSWER_S)
    if done.returncode:
        raise MeasurementError(f"{sys.executable} cannot describe this machine: {last_line(done.stderr)}")
    return _jobs_problems(json.loads(done.stdout), "")


def room_problem(plan: SweepPlan, hosts: Hosts, host: str) -> str:
    """Return the reason that a host now has no space for more files; empty if it has space or is not queried."""
    if not isinstance(plan.topology, Cluster) or plan.topology.reach != "ssh":
        return ""
    question = {"room": {"folder": plan.topology.host(host).workdir, "bytes": _ROOM_LEFT_BYTES}}
    with suppress(MeasurementError), understood(host):
        command = python_command(hosts.python(host), "ringtap.agents.sweep.host_facts", json.dumps(question))
        room = str(json.loads(hosts.ask(host, command).stdout)["room"])
        return room.partition(", and the sweep")[0]  # without the size that was asked for
    return ""


def _ask_host(plan: SweepPlan, host: ClusterHost, hosts: Hosts) -> HostAnswer:
    name = host.name
    try:
        question = json.dumps(_question(plan, host, hosts))
        done = hosts.ask(
            name, python_command(hosts.python(name), "ringtap.agents.sweep.host_facts", question), _ANSWER_S
        )
        apart_s = _apart_s(hosts, name)
    except MeasurementError as error:
        lost = hosts.lost().get(name)
        reach = plan.topology.reach if isinstance(plan.topology, Cluster) else ""
        return HostAnswer(name, {}, (f"{name} cannot be used over {reach}: {lost}" if lost else str(error),))
    if done.returncode:
        message = last_line(done.stderr)
        return HostAnswer(name, {}, (f"host {name}: {hosts.python(name)} cannot describe the host: {message}",))
    try:
        with understood(name):
            facts = json.loads(done.stdout)
            problems = [
                *_clock_problems(name, apart_s),
                *_address_problems(host, facts),
                *_tool_problems(plan, name, facts),
                *_rdma_problems(plan, host, facts),
                *_gpu_problems(plan, host, facts),
            ]
            problems += [f"host {name}: {facts['room']}: free some, or name another workdir"] if facts["room"] else []
            problems += _jobs_problems(facts, f"host {name}, ")
    except MeasurementError as error:
        return HostAnswer(name, {}, (str(error),))
    return HostAnswer(name, facts, tuple(problems))


def _apart_s(hosts: Hosts, host: str) -> tuple[float, float]:
    """Return the lower and upper bound, in seconds, of a host's clock offset from this machine's."""
    before_ns = time.time_ns()
    done = hosts.ask(host, [hosts.python(host), "-S", "-c", f"{LEAVE_FOLDER_OUT}; import time; print(time.time_ns())"])
    after_ns = time.time_ns()
    with understood(host):
        host_ns = int(done.stdout)
    return (host_ns - after_ns) / 1e9, (host_ns - before_ns) / 1e9


def _clock_problems(name: str, apart_s: tuple[float, float]) -> list[str]:
    least, most = apart_s
    if least <= MAX_CLOCK_DIFFERENCE_S and most >= -MAX_CLOCK_DIFFERENCE_S:
        return []
    by_s, relation = (least, "ahead of") if least > 0 else (-most, "behind")
    return [f"the clock of host {name} is {by_s:.1f} s {relation} this machine's: let chrony or ntpd set both"]


def _address_problems(host: ClusterHost, facts: dict[str, Any]) -> list[str]:
    nics = facts["interfaces"]
    if host.interface and host.interface not in nics:
        return [f"host {host.name} has no interface {host.interface}: it has {', '.join(sorted(nics))}"]
    if not host.training and not nics[host.interface]["addresses"]:
        return [f"interface {host.interface} of host {host.name} has no IPv4 address: give training and cross"]
    found = []
    for key, address in {"training": host.training, "cross": host.cross}.items():
        if address and not _interface_of(address, facts):
            own = sorted(each for nic in nics.values() for each in nic["addresses"])
            found.append(f"host {host.name} does not have its {key} address {address}: it has {', '.join(own)}")
    if not found and host.interface and host.training and _interface_of(host.training, facts) != host.interface:
        on = _interface_of(host.training, facts)
        found.append(f"the training address {host.training} of host {host.name} is on {on}, not on {host.interface}")
    return found


def _tool_problems(plan: SweepPlan, name: str, facts: dict[str, Any]) -> list[str]:
    cluster, found = plan.topology, []
    if needs_iperf3(plan) and name in (cluster.cross_from, cluster.cross_to) and not facts["iperf3"]:
        found.append(f"host {name} has no iperf3 on its PATH: install it there, or plan no iperf traffic")
    models = plan.models_on(name).values()
    if any(not model.command for model in models) and "torch" not in facts["modules"]:
        found.append(f"host {name} has no torch for the scale model: install ringtap[demo] there")
    if any(model.framework == "horovod" for model in models) and "horovod" not in facts["modules"]:
        found.append(f"host {name} has no Horovod: run python -m ringtap.examples.build_horovod --install there")
    found += [
        f"host {name} has no {library} for the real model: install ringtap[models] there"
        for library in real_libraries(models)
        if library not in facts["modules"]
    ]
    if (
        name in cluster.servers
        and isinstance(plan, LoadPlan)
        and plan.collectives.names
        and "torch" not in facts["modules"]
    ):
        found.append(f"host {name} has no torch for its parameter server: install ringtap[demo,workload] there")
    return found


def _rdma_problems(plan: SweepPlan, host: ClusterHost, facts: dict[str, Any]) -> list[str]:
    model = next((model for model in plan.every_model if is_rdma(model.transport)), None)
    nic = host.interface or _interface_of(host.training, facts)
    if model is None or host.name not in plan.topology.workers or not nic or _rdma_port(nic, facts):
        return []
    where = f"host {host.name}, model {model.label}"
    return [f"{where}: {nic}, which has the training address, belongs to no RDMA device: give another, or use tcp"]


def _gpu_problems(plan: SweepPlan, host: ClusterHost, facts: dict[str, Any]) -> list[str]:
    """Return a sentence if jobs on a host may take the same GPUs, which would slow each other without any network."""
    assert isinstance(plan.topology, Cluster)
    if isinstance(plan, LoadPlan):
        return []
    users = [job for job in sharing(plan.jobs).get(host.name, ()) if job.model.job != SCALE_MODEL]
    open_jobs = [job.name for job in users if gpus_of(job, plan.topology, host.name) is None]
    if len(users) < 2 or not open_jobs or not facts["gpus"]:
        return []
    gpus, which = counted(facts["gpus"], "GPU"), ", ".join(open_jobs)
    why = f"host {host.name} has {gpus}, which several jobs may take, and the plan does not give {which} any"
    return [f'{why}: set environment = {{ CUDA_VISIBLE_DEVICES = "0" }} in each of [[jobs]], or "" for none']


def _torch_problems(answer: HostAnswer, answers: Sequence[HostAnswer], pythons: Mapping[str, str]) -> list[str]:
    """Return a sentence for each job whose interpreter has torch on another host but not on this one."""
    found = []
    for model, about in answer.facts.get("jobs", {}).items():
        with_torch = [other.host for other in answers if other.facts.get("jobs", {}).get(model, {}).get("torch")]
        if about["torch"] is False and with_torch and not about["problems"]:
            where = f"host {answer.host}, model {model}"
            found.append(
                f"{where}: the job's interpreter {pythons[answer.host]} has no torch, and {pythons[with_torch[0]]} on "
                f"{with_torch[0]} has: install it, or name another interpreter as job_python in [[hosts]]"
            )
    return found


def real_libraries(models: Iterable[Model]) -> list[str]:
    """Return the packages that have those of the models that train themselves."""
    return list(dict.fromkeys(PROFILES[model.name].library for model in models if model.job == REAL))


def needs_iperf3(plan: SweepPlan) -> bool:
    """Return True if a plan sends with iperf3."""
    return isinstance(plan, LoadPlan) and "iperf" in plan.traffic and plan.heaviest_load > 0


def _interface_of(address: str, facts: dict[str, Any]) -> str:
    return next((name for name, nic in facts["interfaces"].items() if address in nic["addresses"]), "")


def cluster_roles(plan: SweepPlan, answers: Sequence[HostAnswer]) -> SweepRoles:
    """Return the roles of a cluster's hosts from their answers.

    Raises:
        UsageError: a host cannot take part.
    """
    cluster = plan.topology
    assert isinstance(cluster, Cluster)
    problems = [problem for answer in answers for problem in answer.problems]
    if problems:
        raise UsageError("; ".join(problems))
    facts = {answer.host: answer.facts for answer in answers}
    ports = {host.name: _port(host, facts[host.name]) for host in cluster.hosts}
    roles = Roles(CUSTOM, cluster.workers, cluster.cross_from, cluster.cross_to, cluster.servers)
    counters = _counters(roles, ports, facts)
    if any(is_rdma(model.transport) for model in plan.every_model):
        counters = _seeing_rdma(plan, counters, facts)
    used = {name: nics for name in ports if (nics := _used_nics(name, roles, ports[name]))}
    total = counters["total"][0]
    mtus = {name: {nic: int(own["mtu"]) for nic, own in item["interfaces"].items()} for name, item in facts.items()}
    return SweepRoles(
        roles=roles,
        recorded=tuple(host.name for host in cluster.hosts),
        training={name: port.training for name, port in ports.items()},
        cross={name: port.cross for name, port in ports.items()},
        interface={name: ports[name].training_nic for name in (*cluster.workers, *cluster.servers)},
        cross_nic={name: port.cross_nic for name, port in ports.items()},
        bottleneck=counters | {"mtu": mtus[total["node"]][total["nic"]]},
        one_clock=len({item["boot_id"] for item in facts.values()}) == 1,
        iperf3={name: item["iperf3"] for name, item in facts.items()},
        most_load_bps=cluster.most_load_bps,
        ports=cluster.ports,
        kernel_ports={name: item.get("kernel_ports", []) for name, item in facts.items()},
        links={name: _with_below(nics, facts[name]) for name, nics in used.items()},
        attachments={name: _attachment(name, nics, facts) for name, nics in used.items()},
        rdma={
            name: f"{found['device']}:{found['port']}"
            for name in cluster.workers
            if (found := _rdma_port(ports[name].training_nic, facts[name]))
        },
        mtus=mtus,
    )


@dataclass(frozen=True)
class _Port:
    """Training and cross address of a host, and the interfaces that have them."""

    training: str
    cross: str
    training_nic: str
    cross_nic: str


def _port(host: ClusterHost, facts: dict[str, Any]) -> _Port:
    training = host.training or facts["interfaces"][host.interface]["addresses"][0]
    cross = host.cross or training
    return _Port(training, cross, _interface_of(training, facts), _interface_of(cross, facts))


def _used_nics(name: str, roles: Roles, port: _Port) -> tuple[str, ...]:
    """Return the interfaces of a host that carry the sweep's traffic."""
    training = [port.training_nic] if name in (*roles.workers, *roles.servers) else []
    cross = [port.cross_nic] if name in (roles.cross_from, roles.cross_to) else []
    return tuple(dict.fromkeys((*training, *cross)))


def _with_below(nics: Sequence[str], facts: dict[str, Any]) -> tuple[str, ...]:
    """Return interfaces and all interfaces below them."""
    found = list(nics)
    for nic in found:
        found += [below for below in facts["interfaces"].get(nic, {}).get("below", []) if below not in found]
    return tuple(found)


def _counted_once(nics: Sequence[str], facts: dict[str, Any]) -> tuple[str, ...]:
    """Return interfaces without those above another one of them, which counts a VLAN's frames, too."""
    return tuple(nic for nic in nics if not set(_with_below([nic], facts)[1:]) & set(nics))


def _attachment(name: str, nics: tuple[str, ...], facts: dict[str, dict[str, Any]]) -> Attachment:
    own = facts[name]["interfaces"]
    lowest = _counted_once(nics, facts[name])
    above = [nic for nic in own if set(_with_below([nic], facts[name])) & set(lowest)]
    addresses = {address for nic in above for key in ("addresses", "addresses6") for address in own[nic].get(key, [])}
    mine = {address for nic in nics for address in own[nic]["addresses"]}
    for other, found in facts.items():
        if other != name and mine & {each for nic in found["interfaces"].values() for each in nic["addresses"]}:
            return Attachment(lowest, frozenset(addresses), f"{name} and {other} share their interfaces")
    return Attachment(lowest, frozenset(addresses))


def _counters(roles: Roles, ports: dict[str, _Port], facts: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the interface counters of the bottleneck.

    The total is all traffic that the receiver receives, or, if the sender also trains, all that the sender sends. The
    cross traffic is counted at one end, on an interface that carries no training traffic; if neither end has one, by
    the bytes that the receiver acknowledges to the sender.
    """
    if not roles.cross_to:
        worker = roles.workers[0]
        return {"cross": [], "total": [nic_counter(worker, ports[worker].training_nic, "rx")]}
    sender, receiver = roles.cross_from, roles.cross_to
    node, direction = (sender, "tx") if sender in roles.workers else (receiver, "rx")
    nics = dict.fromkeys((ports[node].training_nic, ports[node].cross_nic))
    total = [nic_counter(node, nic, direction) for nic in _counted_once(tuple(nics), facts[node])]
    for host, direction in ((receiver, "rx"), (sender, "tx")):
        port = ports[host]
        training = (port.training_nic, *facts[host]["interfaces"][port.training_nic]["below"])
        if host not in roles.workers or port.cross_nic not in training:
            return {"cross": [nic_counter(host, port.cross_nic, direction)], "total": total}
    return {"cross": ACKNOWLEDGED, "total": total}


def _rdma_port(nic: str, facts: dict[str, Any]) -> dict[str, Any] | None:
    """Return the port of an RDMA device that carries an interface's traffic; None if there is none."""
    found = (facts["interfaces"].get(name, {}).get("rdma") for name in _with_below([nic], facts))
    return next((port for port in found if port), None)


def _seeing_rdma(plan: SweepPlan, counters: dict[str, Any], facts: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the bottleneck's counters with those in place of interface counters that also see RDMA.

    Raises:
        UsageError: no counter sees all of the traffic, or the plan's windows are too short for it.
    """
    total: list[dict[str, str]] = []
    for counter in counters["total"]:
        nics = _with_below([counter["nic"]], facts[counter["node"]])
        seeing = [found for nic in nics if (found := _port_counter(counter | {"nic": nic}, facts[counter["node"]]))]
        if not seeing:
            raise UsageError(
                f"host {counter['node']}: no counter of {counter['nic']} sees RDMA: it has no *_phy counters, which a "
                "virtual function lacks, nor those of an InfiniBand port: train over tcp, or on hosts that have them"
            )
        total += [found for found in seeing if found not in total]
    cross = counters["cross"]
    if cross != ACKNOWLEDGED:
        cross = [_port_counter(counter, facts[counter["node"]]) or counter for counter in cross]
    needed_s = max(source_of(counter).min_window_s for counter in total)
    if plan.window.min_s < needed_s:
        raise UsageError(
            f"window.min_time = {plan.window.min_s:g} s is too short: the counters that see RDMA are read every "
            f"{max(source_of(counter).period_s for counter in total):g} s, so give {needed_s:g}s at least"
        )
    return {"cross": cross, "total": total}


def _port_counter(counter: dict[str, str], facts: dict[str, Any]) -> dict[str, str] | None:
    """Return the counter of an interface's port that sees all of its traffic; None if there is none."""
    nic = facts["interfaces"].get(counter["nic"], {})
    port = nic.get("rdma")
    if port and port["counts_all"]:
        return counter | {"source": INFINIBAND, "port": f"{port['device']}-{port['port']}"}
    return counter | {"source": ETHTOOL} if nic.get("phy") else None
