"""Reaches the nodes of the Slurm allocation that this process runs in, each by one job step; files are shared."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from shutil import which

from ringtap.agents.hosts.remote import WORKER_COMMAND, Hosts
from ringtap.core.errors import UsageError
from ringtap.core.parent_death import run_helper

_ASK_S = 5.0
# variables with options of the job and the user that srun would apply to the step, without SLURM_
_OPTIONS = ["CPUS_PER_TASK", "CPUS_PER_GPU", "GPUS", "GPUS_PER_TASK", "GPUS_PER_SOCKET", "GPU_BIND", "TRES_BIND"]
_OPTIONS += ["NTASKS_PER_NODE", "NTASKS_PER_CORE", "NTASKS_PER_SOCKET", "NTASKS_PER_GPU", "MEM_PER_CPU", "MEM_PER_GPU"]
_OPTIONS += ["MEM_PER_NODE", "TRES_PER_TASK", "EXCLUSIVE", "EXACT", "DISTRIBUTION", "DIST_PLANESIZE", "HINT"]
_OPTIONS += ["THREADS_PER_CORE", "HOSTFILE", "LABELIO", "UNBUFFEREDIO", "STDINMODE", "STDOUTMODE", "STDERRMODE"]
# if a job requests GPUs in one of these ways, a step without --gpus gets none or one; from 23.11 on, Slurm
# sets TRES_PER_TASK=gres/gpu:1 in place of GPUS_PER_TASK
_TOTAL_GPUS = ("SLURM_GPUS", "SLURM_GPUS_PER_TASK", "SLURM_TRES_PER_TASK", "SLURM_GPUS_PER_SOCKET")
_STEP = ["--overlap", "--nodes=1", "--ntasks=1", "--mem=0", "--cpu-bind=none", "--mpi=none", "--export=ALL", "--quiet"]
# variables of the host worker's step; with them, frameworks would take its children for the only rank of a job
_RANK = ["PROCID", "LOCALID", "NODEID", "NTASKS", "NPROCS", "TASKS_PER_NODE", "GTIDS", "TASK_PID", "STEP_ID", "STEPID"]
_RANK += ["STEP_NODELIST", "STEP_NUM_NODES", "STEP_NUM_TASKS", "STEP_TASKS_PER_NODE", "STEP_LAUNCHER_PORT"]


def allocated_nodes() -> list[str]:
    """Return the nodes of the allocation that this process runs in, in Slurm's order.

    Raises:
        UsageError: this process does not run in an allocation, or Slurm's commands are missing.
    """
    nodes = os.environ.get("SLURM_JOB_NODELIST", "")
    if not nodes or not os.environ.get("SLURM_JOB_ID"):
        raise UsageError(
            'reach = "slurm" works inside of a Slurm job: submit it (ringtap submit), or take an allocation with salloc'
        )
    for tool in ("srun", "scontrol"):
        if not which(tool):
            raise UsageError(f"{tool} is not found on PATH: load the site's Slurm module")
    names = _scontrol("show", "hostnames", nodes).split()
    if not names:
        raise UsageError(f"scontrol show hostnames {nodes} gives no answer: can Slurm's configuration be read here?")
    return names


class SlurmHosts(Hosts):
    """Nodes of the allocation that this process runs in.

    Args:
        nodes: node of each host.
        pythons: interpreter of each host that does not use the interpreter of this process.

    Raises:
        UsageError: this process does not run in an allocation, or a node is not in it.
    """

    connect_s = 90.0  # a busy slurmctld starts steps late

    def __init__(self, nodes: Mapping[str, str], pythons: Mapping[str, str] | None = None) -> None:
        super().__init__(tuple(nodes))
        self._nodes, self._pythons = dict(nodes), dict(pythons or {})
        self._gpus = _gpus_by_node() if any(name in os.environ for name in _TOTAL_GPUS) else {}
        allocated = allocated_nodes()
        for host, node in nodes.items():
            if node not in allocated:
                raise UsageError(f"node {node} of {host} is not in this allocation, which has {', '.join(allocated)}")

    def command(self, host: str) -> list[str]:
        """Command of a job step that shares all resources of the job on the node with the other steps."""
        node = self._nodes[host]
        step = ["srun", *_STEP, f"--nodelist={node}", *([f"--gpus={self._gpus[node]}"] if node in self._gpus else [])]
        step = [*_without(_OPTIONS), "-u", "SRUN_CPUS_PER_TASK", *step]
        return [*step, *_without(_RANK), self.python(host), *WORKER_COMMAND]

    def python(self, host: str) -> str:
        """Python interpreter on a host that has ringtap."""
        return self._pythons.get(host, sys.executable)

    def explain(self, host: str, stderr: str, why: str, code: int) -> str:
        """Return the reason for the loss of a host, with srun's last message and Slurm's state of the node."""
        reason = super().explain(host, stderr, why, code)
        node = self._nodes[host]
        fields = _scontrol("--oneliner", "show", "node", node).split()
        states = [field.partition("=")[2] for field in fields if field.startswith("State=")]
        return f"{reason} (Slurm calls {node} {states[0]})" if states else reason


def _gpus_by_node() -> dict[str, int]:
    """Return the number of GPUs that the job has on each of its nodes; empty if unknown."""
    job = _scontrol("--oneliner", "--details", "show", "job", os.environ.get("SLURM_JOB_ID", ""))
    found: dict[str, int] = {}
    for nodes, resources in re.findall(r" Nodes=(\S+) CPU_IDs=\S* Mem=\S* GRES=(\S*)", job):
        count = sum(map(int, re.findall(r"\bgpu(?::[^:,(]+)?:(\d+)", resources)))
        found |= dict.fromkeys(_scontrol("show", "hostnames", nodes).split(), count)
    return {node: count for node, count in found.items() if count}


def _scontrol(*arguments: str) -> str:
    """Return the standard output of scontrol; empty if it cannot be run or does not end in time."""
    try:
        return run_helper(["scontrol", *arguments], _ASK_S).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def _without(names: Sequence[str]) -> list[str]:
    """Return a command prefix that removes Slurm's variables of these names from the environment."""
    return ["env", *(word for name in names for word in ("-u", f"SLURM_{name}"))]
