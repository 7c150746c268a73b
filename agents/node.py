"""The agent: one a node, beside a job or alone; starts the collectors, wraps the job, writes the node's folder."""

from __future__ import annotations

import contextlib
import os
import platform
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

import ringtap
from ringtap.agents import hook, relay
from ringtap.collectors.nic import NicCollector
from ringtap.rundir import write_json

_SYSCTLS = (
    "net/ipv4/tcp_congestion_control",
    "net/ipv4/tcp_available_congestion_control",
    "net/ipv4/tcp_rmem",
    "net/ipv4/tcp_wmem",
    "net/ipv4/tcp_slow_start_after_idle",
    "net/ipv4/tcp_tw_reuse",
    "net/ipv4/ip_local_port_range",
    "net/core/rmem_max",
    "net/core/wmem_max",
)


class _Log:
    """ringtap's own words on this node."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def say(self, text: str) -> None:
        """Append one line with the time."""
        with contextlib.suppress(OSError):  # a full disk is no reason to stop a job
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a") as file:
                file.write(f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())} {text}\n")


def run_node(node_folder: Path, command: list[str], every_s: float, seconds: float | None = None) -> int:
    """Record this node until its job ends, or until a signal or so many seconds where there is no job.

    Args:
        node_folder: the node's own folder in a run directory.
        command: the job; empty for none.
        every_s: seconds between samples of the counters.
        seconds: how long to record without a job.

    Returns:
        The job's exit code (128 + signal where one ended it); 0 without a job.
    """
    relay.block_signals()
    log = _Log(node_folder / "log" / "agent.log")
    log.say(f"agent {ringtap.__version__} starts: {' '.join(command) or 'no job'}")
    record = _Record(node_folder, command, every_s, log)
    record.begin()
    pid = relay.spawn(command, record.environment()) if command else 0
    record.start()
    if command:
        code = relay.relay(pid)
        log.say(f"the job ended with exit code {code}")
    else:
        code = 0
        relay.wait_for_end(seconds)
    record.end(code)
    return code


class _Record:
    """What the agent keeps of a node beside its job; whatever fails in here is noted and the job goes on."""

    def __init__(self, node_folder: Path, command: list[str], every_s: float, log: _Log) -> None:
        self._folder, self._log = node_folder, log
        self._nic = NicCollector(node_folder, every_s)
        steps = {"state": "ok" if command else "no job", "reason": ""}
        self._collectors = {"nic": {"state": "ok", "reason": ""}, "steps": steps}
        self._item: dict[str, Any] = {"command": command, "collectors": self._collectors, "before": None, "after": None}

    @contextmanager
    def _harmless(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._log.say(f"{what} failed: {type(error).__name__}: {error}")

    def begin(self) -> None:
        """Before the job: what the node is."""
        with self._harmless("describing the node"):
            self._item["before"] = node_facts()
            write_json(self._folder / "node.json", self._item)

    def environment(self) -> dict[str, str]:
        """The job's environment, with the step recorder in it where that can be had."""
        environment = dict(os.environ)
        with self._harmless("the step recorder"):
            environment |= job_environment(self._folder)
        return environment

    def start(self) -> None:
        """Beside the job: the collectors."""
        nic = self._collectors["nic"]
        nic["state"], nic["reason"] = "failed", "see log/agent.log"
        with self._harmless("the interface collector"):
            nic["state"], nic["reason"] = self._nic.check()
            if nic["state"] == "ok":
                self._nic.start()

    def end(self, code: int) -> None:
        """After the job: the last samples, the node once more, DONE."""
        nic = self._collectors["nic"]
        if nic["state"] == "ok":
            with self._harmless("the interface collector"):
                self._nic.stop()
                nic |= {"missed_samples": str(self._nic.missed_samples), "reason": self._nic.failure or nic["reason"]}
        with self._harmless("describing the node"):
            self._item |= {"after": node_facts(), "exit_code": code}
            write_json(self._folder / "node.json", self._item)
            (self._folder / "DONE").touch()


def job_environment(node_folder: Path) -> dict[str, str]:
    """The environment that makes a job's ranks record their steps: the hook's folder first on PYTHONPATH."""
    steps = (node_folder / "steps").resolve()
    steps.mkdir(parents=True, exist_ok=True)
    hook_folder = str(Path(hook.__file__).resolve().parent)
    paths = [hook_folder, *filter(None, [os.environ.get("PYTHONPATH")])]
    return dict(os.environ) | {"PYTHONPATH": os.pathsep.join(paths), "RINGTAP_STEPS_DIR": str(steps)}


def node_facts() -> dict[str, Any]:
    """What this node is: kernel, Python, processors, interfaces, queueing disciplines, sysctls."""
    facts: dict[str, Any] = {
        "t_ns": time.time_ns(),
        "host": platform.node(),
        "kernel": platform.release(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "executable": sys.executable,
        "cpus": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "load_average_1min": os.getloadavg()[0],
        "nics": {name: row._asdict() | {"duplex": str(row.duplex)} for name, row in psutil.net_if_stats().items()},
        "sysctls": {name.replace("/", "."): _sysctl(name) for name in _SYSCTLS},
    }
    try:
        facts["links"] = _links()
    except Exception as error:  # netlink facts are an extra: what is missing is recorded, the run goes on
        facts["links_missing"] = f"{type(error).__name__}: {error}"
    return facts


def _sysctl(name: str) -> str | None:
    try:
        return Path("/proc/sys", name).read_text().strip()
    except OSError:
        return None


def _links() -> dict[str, Any]:
    """Interfaces as netlink tells them: kind, offload segments, queueing discipline."""
    from pyroute2 import IPRoute

    with IPRoute() as netlink:
        links = {
            link["index"]: {
                "name": link.get_attr("IFLA_IFNAME"),
                "qdisc": link.get_attr("IFLA_QDISC"),
                "gso_max_segs": link.get_attr("IFLA_GSO_MAX_SEGS"),
                "tx_queue_packets": link.get_attr("IFLA_TXQLEN"),
            }
            for link in netlink.get_links()
        }
        for qdisc in netlink.get_qdiscs():
            options = qdisc.get_attr("TCA_OPTIONS")
            limits = options.get_attr("TCA_TBF_PARMS") if qdisc.get_attr("TCA_KIND") == "tbf" and options else None
            if limits:
                links[qdisc["index"]] |= {"rate_bps": limits["rate"] * 8, "queue_bytes": limits["limit"]}
    return {str(link.pop("name")): link for link in links.values()}
