"""Checks a site profile's facts on the cluster itself, on a login node and on a compute node."""

from __future__ import annotations

import os
import platform
import re
import shlex
import socket
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import psutil

from ringtap.agents.doctor.node_checks import gloo_on_loopback, try_to_write
from ringtap.agents.doctor.run_checks import Task
from ringtap.collectors.collector_interface import Check
from ringtap.core.parent_death import run_helper
from ringtap.core.units import counted, format_size
from ringtap.slurm.site_profiles import Nodes, Site
from ringtap.slurm.submission_request import parse_time_s
from ringtap.slurm.submit import expand, file_system

TIMEOUT_S = 90.0  # of all checks together
_SLOW_S = 40.0  # for modules and environments on a slow file system, and pip's look at a whole wheelhouse
# of these versions, ringtap's options and variables of sbatch, srun, squeue and scancel mean the same by Slurm's
# changelogs; --overlap is newer than the versions before
_OLDEST, _NEWEST = (20, 11), (26, 5)
_PYPI = ("pypi.org", 443)
_ANSWER_S = 20.0
_INFINIBAND = "32"  # of /sys/class/net/*/type
_GRES_GPU = re.compile(r"\bgpu:(?:(?P<type>[^:,()]+):)?(?P<count>\d+)")
_NO_WHEEL = re.compile(r"No matching distribution found for (\S+)")


class _NotKnownError(Exception):
    """A program that answers no question, with the reason."""


def _ask(*command: str, timeout_s: float = _ANSWER_S) -> str:
    """Run a program and return what it prints.

    Raises:
        _NotKnownError: it is not there, does not end in time, or fails.
    """
    try:
        done = run_helper(command, timeout_s)
    except OSError as error:
        raise _NotKnownError(f"{command[0]}: {error.strerror}") from error
    except subprocess.TimeoutExpired as error:
        raise _NotKnownError(f"{command[0]} did not answer within {timeout_s:.0f} s") from error
    if done.returncode:
        lines = (done.stderr.strip() or done.stdout.strip()).splitlines()
        raise _NotKnownError(f"{command[0]}: {lines[-1] if lines else f'exit code {done.returncode}'}")
    return done.stdout


def slurm_version(_site: Site) -> Check:
    """Check that ringtap knows this version of Slurm."""
    text = _ask("sinfo", "--version").strip()
    found = re.search(r"(\d+)\.(\d+)", text)
    if not found:
        return Check("degraded", f"{text}: not a version that ringtap can read", "report it")
    version = (int(found[1]), int(found[2]))
    if version < _OLDEST:
        return Check("unavailable", f"{text}: srun has no --overlap, which the recorders need", "ask for Slurm 20.11")
    if version > _NEWEST:
        return Check("degraded", f"{text} is newer than the versions that ringtap knows", "report what fails, if any")
    return Check("ok", text)


def _configuration() -> dict[str, str]:
    lines = (line.partition("=") for line in _ask("scontrol", "show", "config").splitlines())
    return {name.strip(): value.strip() for name, _, value in lines}


def containment(_site: Site) -> Check:
    """Check that Slurm ends the processes that a job leaves behind, and by which means it confines jobs."""
    configuration = _configuration()
    track, task = (configuration.get(name, "unknown") for name in ("ProctrackType", "TaskPlugin"))
    constrained = [name for name, value in configuration.items() if name.startswith("Constrain") and value == "yes"]
    if "cgroup" in task and constrained:
        task += f" ({', '.join(constrained)})"
    version = 2 if Path("/sys/fs/cgroup/cgroup.controllers").exists() else 1
    # from 23.11 on, Slurm prints (null) where it printed task/none
    reason = f"{track}; {task.replace('(null)', 'task/none')}; control groups of version {version} on this node"
    if "cgroup" not in track:
        return Check("degraded", f"{reason}: processes that leave their session outlive a job", "ask the site")
    return Check("ok", reason)


def accounting(_site: Site) -> Check:
    """Check that sacct answers, which knows jobs that squeue has forgotten."""
    lines = _ask("sacct", "--noheader", "--parsable2", "--allocations", "--format=JobID").splitlines()
    return Check("ok", f"sacct answers: {counted(len(lines), 'job')} of yours today")


def account(site: Site) -> Check:
    """Check how many accounts the user has, and if Slurm demands one."""
    accounts = set(_ask("sshare", "-U", "--noheader", "--parsable2", "--format=Account").split())
    enforced = _configuration().get("AccountingStorageEnforce", "unknown")
    reason = f"you have {counted(len(accounts), 'account')}; AccountingStorageEnforce is {enforced}"
    return Check("ok", f"{reason}; the profile requires {', '.join(site.requires) or 'no option'}")


def mpi(_site: Site) -> Check:
    """Return the kinds of MPI that srun can start."""
    words = re.findall(r"^\s+(\S+)", _ask("srun", "--mpi=list"), re.MULTILINE)
    return Check("ok", f"srun --mpi: {', '.join(words)}")


def longest_job(site: Site) -> Check:
    """Compare the longest time limit of all partitions with the profile's."""
    limits = {}
    for line in _ask("sinfo", "--noheader", "--format=%P|%l").splitlines():
        partition, _, limit = line.strip().partition("|")
        limits[partition.rstrip("*")] = None if limit in ("infinite", "n/a") else limit
    if not limits:
        raise _NotKnownError("sinfo shows no partition")
    unlimited = sorted(name for name, limit in limits.items() if limit is None)
    if unlimited:
        return _compare("longest_job", site.longest_job, "", f"no limit in {', '.join(unlimited)}")
    longest = max((limit for limit in limits.values() if limit), key=parse_time_s)
    same = site.longest_job and parse_time_s(site.longest_job) == parse_time_s(longest)
    return _compare("longest_job", site.longest_job, site.longest_job if same else longest)


def _compare(key: str, given: str, found: str, reason: str = "") -> Check:
    """Compare a fact of the profile with what was found; both are empty if there is none."""
    reason = reason or found
    if given == found:
        return Check("ok", f"{reason}, as in the profile")
    return _differs(f'{key} = "{found}"', f"{reason}; the profile says {given or 'nothing'}")


def _differs(setting: str, reason: str) -> Check:
    return Check("degraded", reason, f"in a profile of your own: {setting}")


def nodes(site: Site) -> Check:
    """Compare the nodes that Slurm knows with the kinds of the profile."""
    found: Counter[Nodes] = Counter()
    seen = set()
    for line in _ask("sinfo", "--noheader", "--Node", "--format=%N|%c|%m|%G").splitlines():
        name, cores, memory, gres = line.strip().split("|", 3)
        if name not in seen:
            seen.add(name)
            gpu = _GRES_GPU.search(gres)
            gpus = (int(gpu["count"]),) if gpu else ()
            found[Nodes(0, int(cores), f"{int(memory)}M", (gpu["type"] or "gpu") if gpu else "", gpus)] += 1
    kinds = [f"{count} × {_kind(kind)}" for kind, count in found.most_common()]
    reason = "; ".join(kinds)
    expected = {_comparable(kind) for kind in site.nodes}
    new = [kind for kind in found if _comparable(kind) not in expected]
    gone = expected - {_comparable(kind) for kind in found}
    if site.nodes and (new or gone):
        return _differs("[[nodes]] tables", f"{reason}; the profile says {'; '.join(map(_kind, site.nodes))}")
    return Check("ok", reason + (", as in the profile" if site.nodes else "; the profile says nothing"))


def _comparable(kind: Nodes) -> Nodes:
    """Reduce a kind of node to what Slurm says of it: cores, memory, and the GPUs of a whole node."""
    unit = {"M": 1, "G": 1024, "T": 1024**2}[kind.memory[-1]]
    return replace(kind, count=0, memory=f"{int(kind.memory[:-1]) * unit}M", gpus=kind.gpus[-1:])


def _kind(kind: Nodes) -> str:
    gpus = f", {kind.gpu}:{kind.gpus[-1]}" if kind.gpu and kind.gpus else ""
    return f"{kind.cores} cores, {kind.memory}{gpus}"


def _with_modules(site: Site, command: str) -> tuple[str, ...]:
    load = f"module load {shlex.join(site.modules)} && " if site.modules else ""
    return ("bash", "--login", "-c", load + command)


def modules(site: Site) -> Check:
    """Load the modules, and return the Python that they give."""
    version = _ask(*_with_modules(site, "python3 --version"), timeout_s=_SLOW_S).strip()
    return Check("ok", f"{' '.join(site.modules) or 'none to load'}: {version}")


def wheelhouse(site: Site) -> Check:
    """Make a Python environment, and look for every package of the wheelhouse without downloading one."""
    missing: list[str] = []
    with tempfile.TemporaryDirectory(prefix="ringtap-doctor-") as folder:
        made = f"{site.make_environment} {shlex.quote(folder)}/env >/dev/null"
        look = f"{shlex.quote(folder)}/env/bin/pip install --disable-pip-version-check --dry-run --no-deps --no-index"
        _ask(*_with_modules(site, made), timeout_s=_SLOW_S)
        while wanted := [name for name in site.wheelhouse if name not in missing]:
            try:
                _ask(*_with_modules(site, f"{look} {shlex.join(wanted)}"), timeout_s=_SLOW_S)
                break
            except _NotKnownError as error:
                lacks = _NO_WHEEL.search(str(error))
                if not lacks or lacks[1] not in wanted:
                    raise
                missing.append(lacks[1])
    if missing:
        left = [name for name in site.wheelhouse if name not in missing]
        return _differs(f"wheelhouse = {left}", f"pip install --no-index finds no {', '.join(missing)}")
    return Check("ok", f"{site.make_environment} works; {counted(len(site.wheelhouse), 'package')} found by --no-index")


def shared_file_systems(site: Site) -> Check:
    """Compare the file systems of the user's folders with the profile's."""
    types = {name: file_system(Path(os.environ[name])) for name in ("HOME", "SCRATCH", "PROJECT") if name in os.environ}
    reason = ", ".join(f"${name} is on {kind or 'an unknown type'}" for name, kind in types.items())
    new = sorted(set(types.values()) - set(site.shared_file_systems))
    if site.shared_file_systems and new:
        return _differs(f"shared_file_systems = {[*site.shared_file_systems, *new]}", reason)
    return Check("ok", reason)


def architecture(site: Site) -> Check:
    """Compare the processor architecture of this node with the profile's."""
    return _compare("architecture", site.architecture, platform.machine())


def read_only(site: Site) -> Check:
    """Check that a job cannot write to the folders that the profile calls read-only, and can to the others."""
    wrong, seen = [], []
    for entry in dict.fromkeys((*site.read_only, "$HOME", "$PROJECT", "$SCRATCH")):
        folder = Path(expand(entry, os.environ))
        if not folder.is_absolute() or not folder.is_dir():
            if entry in site.read_only:
                seen.append(f"there is no {entry}")
            continue
        try:
            try_to_write(folder)
            is_read_only = False
        except OSError:
            is_read_only = True
        seen.append(f"{entry} is {'read-only' if is_read_only else 'writable'}")
        if is_read_only != (entry in site.read_only):
            wrong.append(entry)
    reason = ", ".join(seen)
    return (
        _differs("read_only", f"{reason}; not as in the profile: {', '.join(wrong)}") if wrong else Check("ok", reason)
    )


def internet(site: Site) -> Check:
    """Check that a job reaches the internet, by one TCP connection to the Python package index."""
    try:
        socket.create_connection(_PYPI, timeout=5).close()
        reached, reason = True, f"{_PYPI[0]} can be reached"
    except OSError as error:
        reached, reason = False, f"{_PYPI[0]} cannot be reached: {error.strerror or error}"
    if proxies := sorted(name for name in os.environ if name.lower() in ("http_proxy", "https_proxy")):
        reason += f"; there is a proxy ({', '.join(proxies)})"
    if site.internet == reached:
        return Check("ok", f"{reason}, as in the profile")
    given = {None: "nothing", True: "true", False: "false"}[site.internet]
    return _differs(f"internet = {str(reached).lower()}", f"{reason}; the profile says {given}")


def interface(site: Site) -> Check:
    """Return the interface that the host name resolves to, which Gloo takes if the profile names none."""
    host = socket.gethostname()
    addresses = {item[4][0] for item in socket.getaddrinfo(host, None)}
    names = [name for name, found in psutil.net_if_addrs().items() if any(item.address in addresses for item in found)]
    if words := gloo_on_loopback({}):
        return Check("degraded", words, "in a profile of your own: interface")
    if not names:
        raise _NotKnownError(f"{host} resolves to {', '.join(map(str, addresses))}, which is on no interface")
    speeds = psutil.net_if_stats()
    reason = ", ".join(f"{name}{' (InfiniBand)' * _is_infiniband(name)} {_speed(speeds[name].speed)}" for name in names)
    return Check("ok", f"{host} resolves to {reason}; the profile says {site.interface or 'nothing'}")


def _is_infiniband(name: str) -> bool:
    return Path(f"/sys/class/net/{name}/type").read_text().strip() == _INFINIBAND


def _speed(speed_mbps: int) -> str:
    return f"with {speed_mbps / 1000:g} Gbit/s" if speed_mbps > 0 else "of unknown speed"


def fabric(site: Site) -> Check:
    """Return the rates of the RDMA ports beside what the profile says of the fabric."""
    ports = [
        f"{path.parents[2].name} port {path.parent.name}: {path.read_text().strip()}"
        for path in sorted(Path("/sys/class/infiniband").glob("*/ports/*/rate"))
    ]
    return Check("ok", f"{'; '.join(ports) or 'no RDMA port'}; the profile says {site.fabric or 'nothing'}")


def local_disk(_site: Site) -> Check:
    """Check that a job has a folder of its own on the node."""
    folder = os.environ.get("SLURM_TMPDIR", "")
    if not folder or not Path(folder).is_dir():
        return Check("unavailable", "jobs have no $SLURM_TMPDIR", "ringtap submit --python PROGRAM")
    usage = psutil.disk_usage(folder)
    return Check("ok", f"$SLURM_TMPDIR is on {file_system(Path(folder))} with {format_size(usage.free)} free")


_ANYWHERE: tuple[tuple[str, Callable[[Site], Check]], ...] = (
    ("slurm", slurm_version),
    ("containment", containment),
    ("accounting", accounting),
    ("account", account),
    ("mpi", mpi),
    ("longest job", longest_job),
    ("nodes", nodes),
    ("modules", modules),
    ("wheelhouse", wheelhouse),
    ("file systems", shared_file_systems),
)
_IN_A_JOB: tuple[tuple[str, Callable[[Site], Check]], ...] = (
    ("architecture", architecture),
    ("read-only", read_only),
    ("internet", internet),
    ("interface", interface),
    ("fabric", fabric),
    ("local disk", local_disk),
)


def site_tasks(site: Site, given: str) -> list[Task]:
    """Return the checks of a site's facts, in the order of the result.

    Args:
        site: the site.
        given: its name or file, as the user gave it.
    """
    tasks = [Task("site", (name,), partial(_run, name, work, site)) for name, work in _ANYWHERE]
    if "SLURM_JOB_ID" in os.environ:
        return tasks + [Task("site", (name,), partial(_run, name, work, site)) for name, work in _IN_A_JOB]
    return [*tasks, Task("site", ("in a job",), lambda: {"in a job": _later(site, given)})]


def _run(name: str, work: Callable[[Site], Check], site: Site) -> dict[str, Check]:
    try:
        return {name: work(site)}
    except _NotKnownError as error:
        return {name: Check("unavailable", f"not known: {error}")}


def _later(site: Site, given: str) -> Check:
    options = {"account": "--account=YOURS ", "time": "--time=5 "}
    needed = "".join(options.get(name, "") for name in site.requires)
    remedy = f"srun {needed}ringtap doctor --site {shlex.quote(given)}"
    return Check("unavailable", f"a job alone sees: {', '.join(name for name, _ in _IN_A_JOB)}", remedy)
