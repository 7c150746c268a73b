"""Prepares the start of a job: its run directory, and commands and variables of its processes, by host and rank."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from ringtap.agents.hook.ringtap_hook.replace_ddp_all_reduce import VARIABLE
from ringtap.agents.hosts import Hosts
from ringtap.agents.sweep.detect_disturbances import collect_options
from ringtap.agents.sweep.host_connections import check_lost
from ringtap.agents.sweep.host_roles import SweepRoles
from ringtap.agents.sweep.sweep_estimate import layout
from ringtap.core.errors import UsageError, failure_message
from ringtap.core.installation import require, with_shipped_examples
from ringtap.core.isolated_python import python_command
from ringtap.core.run_directory import RunDirectory
from ringtap.core.sweep_plans.cluster_hosts import Cluster
from ringtap.core.sweep_plans.collective_algorithms import IN_NETWORK, PARAMETER_SERVER
from ringtap.core.sweep_plans.sweep_plan import SharingPlan, SweepPlan, Testbed
from ringtap.core.sweep_plans.training_jobs import PLACEHOLDERS, REAL, Model
from ringtap.core.training_transports import is_rdma

# with sh, as older versions of env(1) cannot change the folder
_IN_FOLDER = ["sh", "-c", 'cd -- "$1" && shift && exec "$@"', "sh"]


class RankProcess(NamedTuple):
    """Process of a job that is to be started.

    Attributes:
        host: host on which it runs.
        command: the command and its arguments.
        environment: variables in addition to those of the host.
        log: name of the file for its output.
        name: as used in messages.
    """

    host: str
    command: list[str]
    environment: dict[str, str]
    log: str
    name: str


@contextmanager
def job_run(hosts: Hosts, path: Path, seed: int, **facts: Any) -> Iterator[RunDirectory]:
    """Create a job's run directory, in which hosts record until the end of the block; record how the block ended.

    Args:
        hosts: the hosts, whose processes all end with the block.
        path: the run directory.
        seed: seed of everything random.
        facts: further facts for its run.json.

    Raises:
        LostHostError: a host is lost at the end.
    """
    run = RunDirectory.create(path, "job", sys.argv, seed, **facts)
    hosts.publish(path)
    try:
        try:
            yield run
        finally:
            hosts.stop_all()
            hosts.gather(path)
        check_lost(hosts)
    except BaseException as error:
        run.finish("partial", "interrupted" if isinstance(error, KeyboardInterrupt) else failure_message(error))
        raise
    run.finish("complete")


def recorded(
    hosts: Hosts, run: RunDirectory, network: SweepRoles, node: str, collectors: Sequence[str], command: list[str]
) -> list[str]:
    """Return the command that records a node into a run while a command runs there, or without one until it is ended.

    Args:
        hosts: the hosts.
        run: the published run directory.
        network: what is always recorded.
        node: the node.
        collectors: what else is recorded.
        command: a rank's command; empty for none.
    """
    record = [*collect_options(network, node, *collectors), "--join", hosts.path(node, run.path), "--node", node]
    return [*hosts.ringtap(node), *(["run", *record, "--", *command] if command else ["record", *record])]


def ranks_of(plan: SweepPlan, host: str) -> int:
    """Return the number of ranks of a job on a worker."""
    return plan.topology.host(host).ranks if isinstance(plan.topology, Cluster) else 1


def job_python(plan: SweepPlan, host: str, hosts: Hosts) -> str:
    """Return the Python interpreter of the job on a host."""
    own = plan.topology.host(host).job_python if isinstance(plan.topology, Cluster) else ""
    return own or hosts.python(host)


def own_environment(plan: SweepPlan, model: Model, host: str) -> dict[str, str]:
    """Return the environment variables that the plan gives a job on a host: the cluster's, the model's, the host's."""
    if not isinstance(plan.topology, Cluster):
        return dict(model.environment)
    machine = plan.topology.host(host)
    gpus = {"CUDA_VISIBLE_DEVICES": ",".join(machine.gpus)} if machine.gpus else {}
    order = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"} if gpus else {}  # as nvidia-smi counts; CUDA begins with the fastest
    return {**order, **plan.topology.environment, **model.environment, **machine.environment, **gpus}


def check_collectives(plan: SweepPlan) -> None:
    """Check that the workers of a plan can exchange gradients by each of its collectives.

    Raises:
        UsageError: they cannot, or software is missing.
    """
    if isinstance(plan, SharingPlan) or not plan.collectives.names:
        return
    require("collective", ("numpy",))
    from ringtap.workload.collectives import Shape, message_graph

    workers = plan.topology.workers if isinstance(plan.topology, Cluster) else layout(plan)[1].workers
    ranks = sum(ranks_of(plan, host) for host in workers)
    for model in plan.models:
        algorithm, numbers = _algorithm(plan, model, workers[0])
        try:
            message_graph(algorithm, Shape(ranks, ranks, **numbers))
        except UsageError as error:
            raise UsageError(f"collective {model.collective!r}: {error}") from error


def _algorithm(plan: SweepPlan, model: Model, first: str) -> tuple[str, dict[str, int]]:
    """Return the algorithm of a model's collective and its numbers; nothing if it has none."""
    if isinstance(plan, SharingPlan) or not model.collective:
        return "", {}
    return plan.collectives.algorithm(model.collective, len(plan.topology.servers), ranks_of(plan, first))


def processes(plan: SweepPlan, model: Model, network: SweepRoles, hosts: Hosts, port: int) -> list[RankProcess]:
    """Return the processes of a model's job: its ranks, rank 0 first, then its parameter servers or its switch.

    Args:
        plan: the sweep.
        model: the model.
        network: the workers and their addresses.
        hosts: the hosts.
        port: a free TCP port of the first worker.
    """
    workers = network.roles.workers
    if isinstance(plan.topology, Testbed):
        model = replace(model, command=tuple(on_this_machine(model)))
    counts = [ranks_of(plan, host) for host in workers]
    master = {"MASTER_ADDR": network.training[workers[0]], "MASTER_PORT": str(port)}
    algorithm, numbers = _algorithm(plan, model, workers[0])
    words = [algorithm, *(f"{name}={value}" for name, value in numbers.items())]
    collective = {VARIABLE: " ".join(words)} if algorithm else {}
    found = []
    for number, host in enumerate(workers):
        values = {
            "python": job_python(plan, host, hosts),
            "host": host,
            "address": network.training[host],
            "ranks": str(counts[number]),
            "hosts": str(len(workers)),
            "host_rank": str(number),
            "master_addr": master["MASTER_ADDR"],
            "master_port": master["MASTER_PORT"],
        }
        environment = _environment(plan, model, network, host) | master | collective
        command = _command(plan, model, values, hosts.python(host))
        if model.launch == "host":
            found.append(RankProcess(host, command, environment, "job.out", model.title))
            continue
        for local in range(counts[number]):
            ranks = {"RANK": sum(counts[:number]) + local, "LOCAL_RANK": local}
            ranks |= {"WORLD_SIZE": sum(counts), "LOCAL_WORLD_SIZE": counts[number]}
            own = {name: str(value) for name, value in ranks.items()}
            log = f"job-{local}.out" if local else "job.out"
            found.append(RankProcess(host, command, environment | own, log, model.title))
    places = {IN_NETWORK: (network.aggregator,), PARAMETER_SERVER: network.roles.servers[: numbers.get("shards", 1)]}
    for number, host in enumerate(places.get(algorithm, ())):
        options = {"--collective": algorithm} | {f"--{name}": value for name, value in numbers.items()}
        options |= {"--workers": sum(counts), "--number": number}
        command = python_command(hosts.python(host), "ringtap.workload.ddp_message_graph_exchange")
        command += [str(word) for option in options.items() for word in option]
        environment = _environment(plan, model, network, host) | master
        found.append(RankProcess(host, command, environment, f"{algorithm}.out", algorithm))
    return found


def _environment(plan: SweepPlan, model: Model, network: SweepRoles, host: str) -> dict[str, str]:
    """Return the variables of a job's processes on a host that do not depend on the rank."""
    interface = network.interface[host]
    return {
        "GLOO_SOCKET_IFNAME": interface,
        "NCCL_SOCKET_IFNAME": f"={interface}",  # without "=", NCCL takes any interface with this prefix
        "OMP_NUM_THREADS": "1",
        **({"NCCL_IB_HCA": f"={network.rdma[host]}"} if is_rdma(model.transport) else {}),
        **own_environment(plan, model, host),
    }


def _command(plan: SweepPlan, model: Model, values: Mapping[str, str], python: str) -> list[str]:
    command = filled(model.command, values) or [python, "-m", *_module(plan, model)]
    if model.framework == "horovod":  # derives Horovod's variables from torchrun's
        command = python_command(python, "ringtap.examples.horovod_rank", *command)
    return [*_IN_FOLDER, model.directory, *command] if model.directory else command


def on_this_machine(model: Model, say: Callable[[str], object] = str) -> list[str]:
    """Return the command of a model on this machine's files, where the examples that ship with ringtap are known."""
    return list(model.command) if model.directory else with_shipped_examples(model.command, say)


def filled(command: tuple[str, ...], values: Mapping[str, str]) -> list[str]:
    """Return a command with `PLACEHOLDERS` replaced by a host's values; other braces are kept."""
    pattern = rf"\{{({'|'.join(PLACEHOLDERS)})\}}"
    return [re.sub(pattern, lambda match: values[match[1]], word) for word in command]


def _module(plan: SweepPlan, model: Model) -> list[str]:
    """Return the module of the scale model or of the real model, with its options."""
    uses_horovod = model.framework == "horovod"
    options: dict[str, object] = {"--model": model.name}
    if model.job == REAL:
        module, options = "real_model", options | {"--batch": model.batch}
    else:
        module = "horovod_model" if uses_horovod else "scale_model"
        options = options | {"--scale": plan.scale}
        if model.layers is not None:
            options = {"--parameters": round(model.parameters / plan.scale), "--layers": model.layers}
        options["--compute-s"] = model.compute_s
    options["--bucket-bytes"] = round(model.bucket_bytes / plan.scale)
    options["--first-bucket-bytes"] = round(model.first_bucket_bytes / plan.scale)
    words = [str(word) for option in options.items() for word in option]
    return [f"ringtap.examples.{module}", *words, *(["--horovod"] if uses_horovod and model.job == REAL else [])]
