"""Collects facts about a host before a sweep: ``python -m ringtap.agents.sweep.host_facts [QUESTION]``.

The question is a JSON object. ``room`` asks for free space on a disk (``folder``, ``bytes``). ``jobs`` asks for the
program, script and interpreter of jobs (by name: ``command``, ``directory`` and ``environment``).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import sys
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil

from ringtap.agents.clock.local_clock import boot_id
from ringtap.agents.hosts.link_lease import held
from ringtap.collectors.ethtool import counts_port
from ringtap.collectors.infiniband import DEVICES, rdma_ports
from ringtap.core.units import format_size

MODULES = ("torch", "horovod", "torchvision", "transformers")
_TRIES = 100
_TRIAL_BYTES = 1 << 20
_INTERPRETER_S = 30.0  # an interpreter on a network file system starts slowly
_PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_GPUS = Path("/proc/driver/nvidia/gpus")


def host_facts() -> dict[str, Any]:
    """Return facts about this host.

    Returns:
        ``boot_id``, ``iperf3`` (its path or ""), ``modules`` (those of `MODULES` that are installed), ``kernel_ports``
        (first and last port that the kernel picks), ``gpus`` (number of NVIDIA GPUs), ``lease`` (facts about the sweep
        that holds the host's lease) and ``interfaces``: by name ``addresses`` (IPv4), ``addresses6``, ``mtu``,
        ``below`` (its lower interfaces), ``phy`` (True if its driver counts the physical port) and ``rdma`` (its port
        of an RDMA device, if it has one).
    """
    states = psutil.net_if_stats()
    rdma = {name: port._asdict() for port in rdma_ports(DEVICES) for name in port.interfaces}
    interfaces: dict[str, dict[str, Any]] = {}
    for label, entries in psutil.net_if_addrs().items():
        name = label.partition(":")[0]  # eth0:1 labels another address of eth0
        if name not in states:  # it is gone
            continue
        below = []
        with suppress(OSError):
            below = [path.name.removeprefix("lower_") for path in Path("/sys/class/net", name).glob("lower_*")]
        item: dict[str, Any] = {"addresses": [], "addresses6": [], "below": below, "mtu": states[name].mtu}
        item = interfaces.setdefault(name, item)
        item |= {"phy": counts_port(name), "rdma": rdma.get(name)}
        item["addresses"] += [entry.address for entry in entries if entry.family == socket.AF_INET]
        item["addresses6"] += [entry.address.partition("%")[0] for entry in entries if entry.family == socket.AF_INET6]
    return {
        "boot_id": boot_id(),
        "iperf3": shutil.which("iperf3") or "",
        "modules": [name for name in MODULES if find_spec(name)],
        "kernel_ports": _PORT_RANGE.read_text().split() if _PORT_RANGE.exists() else [],
        "gpus": len(list(_GPUS.iterdir())) if _GPUS.is_dir() else 0,
        "lease": held(),
        "interfaces": interfaces,
    }


def space_problem(path: Path, needed_bytes: int) -> str:
    """Return the reason that a folder's disk has no space for a run's files; empty if it has space.

    Raises:
        OSError: the disk cannot be queried.
    """
    found = os.statvfs(path)
    free_bytes = found.f_bavail * found.f_frsize
    # file systems without blocks, like /proc, have no size; a trial write shows what they allow
    if found.f_blocks and free_bytes < needed_bytes:
        return f"{path} has {format_size(free_bytes)} left, and the sweep may write {format_size(needed_bytes)}"
    if found.f_files and not found.f_favail:
        return f"the disk of {path} has no inodes left"
    return ""


def nearest_folder(path: Path) -> Path:
    """Return the folder itself, or its nearest parent that exists."""
    while not path.is_dir() and path != path.parent:
        path = path.parent
    return path


def room_problem(folder: str, needed_bytes: int) -> str:
    """Return the reason that a folder has no space for a run's files; empty if it has space.

    Args:
        folder: the folder, which need not exist yet; empty: the default of sweeps, below /tmp.
        needed_bytes: space that the files may need.
    """
    path = nearest_folder(Path(folder or "/tmp"))
    try:
        if problem := space_problem(path, needed_bytes):
            return problem
        with tempfile.TemporaryFile(dir=path) as file:  # only a write detects a quota
            file.write(bytes(min(_TRIAL_BYTES, needed_bytes)))
            file.flush()
    except OSError as error:
        return f"{path} cannot be written: {error.strerror}"
    return ""


def job_facts(command: list[str], directory: str, environment: Mapping[str, str]) -> dict[str, Any]:
    """Check the program, script and interpreter of a job on this host.

    Args:
        command: command of the job.
        directory: folder in which the job is started; empty: the current one.
        environment: variables in addition to those of this process.

    Returns:
        ``problems``, one sentence each, and ``torch``: True if the job's interpreter has torch, None if unknown.
    """
    saved_environment, saved_folder = dict(os.environ), os.open(".", os.O_RDONLY)
    try:
        os.environ.update(environment)
        try:
            os.chdir(directory or ".")
        except OSError as error:
            return {"problems": [f"the job's folder {directory} cannot be entered: {error.strerror}"], "torch": None}
        return _command_facts(command)
    finally:
        os.fchdir(saved_folder)
        os.close(saved_folder)
        os.environ.clear()
        os.environ.update(saved_environment)


def _command_facts(command: list[str]) -> dict[str, Any]:
    program = shutil.which(command[0])
    if program is None:
        where = "there" if "/" in command[0] else "on the PATH there"
        return {
            "problems": [f"the job's command begins with {command[0]}, which is not a program {where}"],
            "torch": None,
        }
    problems = []
    options = next((command[1 : 1 + n] for n, word in enumerate(command[1:]) if not word.startswith("-")), command[1:])
    if not {"-c", "-lc"} & set(command[1:3]):
        script = next((word for word in command[1:] if word.endswith((".py", ".sh"))), "")
        if script and not Path(script).is_file():
            problems.append(f"the job's script {script} is not there (looked for from {Path.cwd()})")
    has_torch: bool | None = None
    if re.fullmatch(r"python(\d+(\.\d+)?)?", Path(program).name):
        from ringtap.agents.doctor import job_interpreter

        steps = job_interpreter.check(program, _INTERPRETER_S)["steps"]
        has_torch = None if steps.state == "failed" else steps.state == "ok"
        if steps.state == "unavailable":
            problems.append(f"steps of the job cannot be recorded: {steps.reason}; {steps.remedy}")
        if any(re.fullmatch(r"-[a-zA-Z]*[IES][a-zA-Z]*", option) for option in options):
            problems.append(f"the job's command starts Python with {' '.join(options)}, so its steps are not recorded")
    return {"problems": problems, "torch": has_torch}


def free_port(address: str, count: int = 1, ports: tuple[int, int] | None = None) -> int:
    """Return the first of ``count`` consecutive TCP ports that are not in use.

    Args:
        address: an address of this host.
        count: number of ports.
        ports: the first and the last port that may be used; None: ports that the kernel picks.

    Raises:
        OSError: the address does not belong to this host, or no such ports are free.
    """
    tries = range(ports[0], ports[1] - count + 2) if ports else [0] * _TRIES
    for attempt, wanted in enumerate(tries, 1):
        with ExitStack() as stack:
            try:
                first = stack.enter_context(socket.create_server((address, wanted))).getsockname()[1]
                for number in range(1, count):
                    stack.enter_context(socket.create_server((address, first + number)))
            except (OSError, OverflowError):
                if attempt == len(tries):
                    raise
                continue
            return int(first)
    raise AssertionError


def main() -> int:
    """Print the answer to a question as JSON."""
    question = json.loads(sys.argv[1]) if len(sys.argv) > 1 else {}
    facts = host_facts()
    room = question.get("room")
    facts["room"] = room_problem(room["folder"], room["bytes"]) if room else ""
    facts["jobs"] = {name: job_facts(**about) for name, about in question.get("jobs", {}).items()}
    print(json.dumps(facts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
