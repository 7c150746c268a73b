"""Records packets at a sweep's loads: chooses the interfaces, checks them before, and records after a window."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Mapping
from typing import Any

from ringtap.agents.hosts import HostProcess, Hosts, understood
from ringtap.agents.node.packet_recorder_process import READY
from ringtap.agents.sweep.host_roles import SweepRoles
from ringtap.core.errors import MeasurementError, UsageError
from ringtap.core.isolated_python import python_command
from ringtap.core.json_validation import load_json
from ringtap.core.run_directory import RunDirectory
from ringtap.core.run_directory_schema import CAPTURED_JSON, PACKETS
from ringtap.core.sweep_plans.cluster_hosts import Cluster
from ringtap.core.sweep_plans.sweep_plan import LoadPlan

_MODULE = "ringtap.agents.node.packet_recorder_process"
_READY_S = 20.0  # Python starts slowly on a busy host
_POLL_S = 0.05


def capture_points(network: SweepRoles) -> dict[str, tuple[str, ...]]:
    """Return the interfaces on which packets are recorded, by node (thesis, figure 3-9).

    These are the bottleneck, its host, the host of the cross traffic, and a worker that shares nothing with it.
    """
    roles, total = network.roles, network.bottleneck["total"]
    found = {str(total[0]["node"]): tuple(dict.fromkeys(str(counter["nic"]) for counter in total))}
    ends = (roles.cross_from, roles.cross_to)
    alone = [worker for worker in roles.workers if worker not in ends]
    shared = roles.cross_from if roles.cross_from in roles.workers else roles.cross_to
    for host in (*alone[-1:], shared, roles.cross_from):
        if host in network.attachments:
            found[host] = network.attachments[host].nics
    return found


def describe(network: SweepRoles) -> dict[str, Any]:
    """Return the capture points, and what tells the sweep's flows apart in them, for run.json."""
    hosts = {
        host: {"training": network.training[host], "cross": network.cross[host], "cross_nic": network.cross_nic[host]}
        | {"training_nic": network.interface.get(host, "")}
        for host in network.attachments
    }
    return {"interfaces": {node: list(nics) for node, nics in capture_points(network).items()}, "hosts": hosts}


def _options(plan: LoadPlan, network: SweepRoles, node: str) -> dict[str, Any]:
    assert plan.capture is not None
    options: dict[str, Any] = {"interfaces": capture_points(network)[node], "most_bytes": str(plan.capture.max_bytes)}
    if isinstance(plan.topology, Cluster):  # the interfaces may carry packets of others, which concern nobody here
        sides = (*network.training.items(), *network.cross.items())
        others = {address for host, address in sides if host != node}
        options["filter"] = "tcp and (" + " or ".join(f"host {address}" for address in sorted(others)) + ")"
    return options


def check_capture(plan: LoadPlan, hosts: Hosts, network: SweepRoles) -> list[str]:
    """Check that packets can be recorded at every capture point; return warnings.

    Raises:
        UsageError: they cannot.
        MeasurementError: a host does not answer.
    """
    problems: list[str] = []
    warnings: list[str] = []
    for node in capture_points(network):
        done = hosts.ask(node, python_command(hosts.python(node), _MODULE, json.dumps(_options(plan, network, node))))
        with understood(node):
            for check in json.loads(done.stdout).values():
                if check["state"] == "unavailable":
                    remedy = f" ({check['remedy']})" if check["remedy"] else ""
                    problems.append(f"{node}: {check['reason']}{remedy}")
                elif check["state"] == "degraded":
                    warnings.append(f"{node}: {check['reason']}")
    if problems:
        raise UsageError(f"no packets can be recorded, which sweep.capture asks for: {'; '.join(problems)}")
    return warnings


class PacketCapture:
    """Recording of packets at all capture points, below ``packets/`` of each node.

    Args:
        plan: the sweep.
        hosts: the hosts.
        network: roles of the hosts.
        run: the job run directory.
        part: name of the load step, which begins the files' names.
    """

    def __init__(self, plan: LoadPlan, hosts: Hosts, network: SweepRoles, run: RunDirectory, part: str) -> None:
        self._plan, self._hosts, self._network, self._run, self._part = plan, hosts, network, run, part
        self._processes: dict[str, HostProcess] = {}

    def start(self) -> None:
        """Start the recording everywhere and wait until it runs.

        Raises:
            MeasurementError: it does not.
        """
        for node in capture_points(self._network):
            folder = self._hosts.path(node, self._run.node(node))
            item = _options(self._plan, self._network, node) | {"folder": folder, "part": self._part}
            command = python_command(self._hosts.python(node), _MODULE, json.dumps(item))
            log = self._run.node(node) / "log" / f"packets-{self._part}.log"
            self._processes[node] = self._hosts.start(node, "packet capture", command, log)
        deadline_s = time.monotonic() + _READY_S
        for process in self._processes.values():
            while READY not in process.last_words():
                if process.exit_code() is not None or time.monotonic() > deadline_s:
                    raise MeasurementError(f"the {process.name} does not start: {process.last_words()}")
                time.sleep(_POLL_S)

    def stop(self) -> None:
        """End the recording; its files are complete and on this machine afterwards."""
        for process in self._processes.values():
            process.ask_once(signal.SIGTERM)
        for process in self._processes.values():
            process.stop()
        self._hosts.gather(self._run.path)

    def outcome(self) -> tuple[int | None, str]:
        """Return the time at which the first capture ended early (CLOCK_REALTIME, ns; None: none did), and problems."""
        early_ns, problems = None, []
        for node, process in self._processes.items():
            if process.exit_code():
                problems.append(f"{node}: {process.last_words()}")
            for path in sorted(self._run.node(node).glob(CAPTURED_JSON.format(part=self._part))):
                facts: Mapping[str, Any] = load_json(path, PACKETS)
                if str(facts.get("ended", "")).startswith("early"):
                    problems.append(f"{node}: the capture on {facts['interface']} ended {facts['ended']}")
                    early_ns = min(early_ns or facts["end_ns"], facts["end_ns"])
        return early_ns, "; ".join(problems)
