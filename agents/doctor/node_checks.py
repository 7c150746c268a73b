"""Checks a node: clock, run directory, scheduler, cores, limits, shared memory and network interfaces."""

from __future__ import annotations

import errno
import ipaddress
import os
import re
import resource
import shutil
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import psutil

from ringtap.agents.clock import local_clock
from ringtap.agents.clock.ping_protocol import open_socket, receive
from ringtap.collectors.collector_interface import Check
from ringtap.collectors.kernel_files import CGROUP_FILE, CGROUP_ROOT, control_groups, memory_groups, text_of
from ringtap.core.installation import pip
from ringtap.core.units import counted, format_duration, format_size

_DAEMONS = ("chronyd", "ntpd", "systemd-timesyn", "ptp4l", "phc2sys", "openntpd")
_SLOW_CLOCKS = ("hpet", "acpi_pm", "jiffies", "refined-jiffies")
_MIN_FILES = 1024
_MIN_SHM_BYTES = 256 * 2**20
_MIN_FREE_BYTES = 2**30
_NO_LIMIT_BYTES = 1 << 60


def on_alliance() -> bool:
    """Return True if this is a cluster of the Digital Research Alliance of Canada."""
    return bool(os.environ.get("CC_CLUSTER"))


def install_hint(package: str) -> str:
    """Return a command that installs a Python package on this machine."""
    if on_alliance():
        return f"pip download {package} on a login node, then pip install --no-index --find-links=. {package}"
    return f"{pip()} install {package}"


def _slurm_nodes() -> int:
    for name in ("SLURM_JOB_NUM_NODES", "SLURM_NNODES"):
        if os.environ.get(name, "").isdigit():
            return int(os.environ[name])
    return 1


def run_directory(runs: Path) -> Check:
    """Check that a run directory can be made below a folder, that it has space, and that a job's nodes share it."""
    folder = runs.absolute()
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir():
        return Check("unavailable", f"{folder} is not a folder", "name another place with -o DIR")
    try:
        try_to_write(folder)
    except OSError as error:
        return Check("unavailable", f"{folder} cannot be written: {error.strerror}", _elsewhere())
    kind, local = local_clock.file_system(folder)
    free_bytes = shutil.disk_usage(folder).free
    summary = f"{folder} is on {kind} with {format_size(free_bytes)} free"
    if free_bytes < _MIN_FREE_BYTES:
        return Check("degraded", summary, "make room, or name another place with -o DIR")
    if local and _slurm_nodes() > 1:
        reason = f"{summary}, which the job's {_slurm_nodes()} nodes do not share: each would record apart"
        return Check("degraded", reason, _elsewhere())
    return Check("ok", summary)


def _elsewhere() -> str:
    scratch = os.environ.get("SCRATCH")
    destination = f"{scratch}/runs" if scratch else "a folder on a file system that all nodes can write"
    return f"name another place: -o {destination}" + (
        " (HOME and PROJECT are read-only on Trillium's compute nodes)" if on_alliance() else ""
    )


def try_to_write(folder: Path) -> None:
    """Create an unnamed file; if the file system does not support them, create a named file and remove it at once."""
    try:
        os.close(os.open(folder, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o600))
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT):
            raise
        path = folder / f".ringtap-doctor-{os.getpid()}"
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600))
        path.unlink()


def clock(_runs: Path) -> Check:
    """Check the kernel's receive timestamps, the synchronisation of the clock, and the clock source."""
    state = local_clock.adjtimex()
    source = text_of("/sys/devices/system/clocksource/clocksource0/current_clocksource")
    issues, remedies = [], []
    if not _kernel_stamps():
        issues.append("the kernel stamps no datagrams, so clock errors are larger")
        remedies.append("leave the sandbox (gVisor and the like)")
    if "missing" in state:
        issues.append(f"its synchronisation is unknown ({state['missing']})")
    elif not state["synchronised"]:
        running = _daemon()
        issues.append("not synchronised" + (f", although {running} runs" if running else ": no time daemon has set it"))
        remedies.append("ask for chrony on the node; within a run ringtap measures the offsets itself")
    if source in _SLOW_CLOCKS:
        issues.append(f"clock source {source} is slow to read")
        remedies.append("ask the site why the kernel gave up tsc")
    if issues:
        return Check("degraded", "; ".join(issues), "; ".join(remedies))
    error = format_duration(state["max_error_us"] / 1e6)
    return Check("ok", f"synchronised, off by {error} at most; kernel receive stamps; source {source or 'unknown'}")


def _kernel_stamps() -> bool:
    """Return True if a datagram over loopback arrives with a kernel timestamp."""
    with open_socket("127.0.0.1") as sock:
        for _ in range(2):  # the first one after the option is set may lack it
            with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
                sender.sendto(b"?", sock.getsockname())
            sock.settimeout(0.1)
            with suppress(OSError):
                if receive(sock, local_clock.Clock())[3]:
                    return True
    return False


def _daemon() -> str:
    for process in psutil.process_iter(["name"]):
        if str(process.info["name"]).startswith(_DAEMONS):
            return str(process.info["name"])
    return ""


def scheduler(_runs: Path) -> Check:
    """Check that this process runs in a scheduler's job, if there is a scheduler."""
    environment = os.environ
    cluster = environment.get("CC_CLUSTER") or environment.get("SLURM_CLUSTER_NAME", "")
    where = f" on {cluster}" if cluster else ""
    if job := environment.get("SLURM_JOB_ID"):
        step = environment.get("SLURM_STEP_ID")
        tasks = environment.get("SLURM_NTASKS") or environment.get("SLURM_STEP_NUM_TASKS", "?")
        summary = f"Slurm job {job}{f' step {step}' if step else ''}{where}: {counted(_slurm_nodes(), 'node')}, "
        summary += counted(int(tasks), "task") if tasks.isdecimal() else f"{tasks} tasks"
        return Check("ok", summary)
    for name, title in (("PBS_JOBID", "PBS"), ("LSB_JOBID", "LSF"), ("JOB_ID", "Grid Engine")):
        if environment.get(name):
            return Check("ok", f"{title} job {environment[name]}")
    if shutil.which("srun") or cluster:
        account = " --account=def-NAME" if on_alliance() else ""
        remedy = f"ask again from a job: salloc{account} --time=0:10:0 --nodes=1, then srun ringtap doctor"
        return Check("degraded", f"no job: this is a login node{where}, or a node by ssh", remedy)
    return Check("ok", "none: no job is needed here")


def cores(_runs: Path) -> Check:
    """Check the processor cores and the memory that this job may use."""
    usable = len(os.sched_getaffinity(0))
    share = cpu_share()
    count = min(usable, share) if share else usable
    summary = f"{count:g} of {counted(os.cpu_count() or 1, 'core')}"
    memory_bytes = memory_limit_bytes()
    if memory_bytes:
        summary += f", {format_size(memory_bytes)} of memory for the job"
    if count <= 1:
        return Check("degraded", f"{summary}: job and agent share one", "ask for a core more (--cpus-per-task)")
    return Check("ok", summary)


def cpu_share() -> float:
    """Number of cores that the lowest CPU quota of a control group allows; 0 without a quota."""
    shares = []
    for controllers, folder in control_groups(CGROUP_FILE, CGROUP_ROOT):
        if not controllers:
            quota = text_of(folder / "cpu.max").split()
        elif "cpu" in controllers.split(","):
            quota = [text_of(folder / "cpu.cfs_quota_us"), text_of(folder / "cpu.cfs_period_us")]
        else:
            continue
        if len(quota) == 2 and all(re.fullmatch("[0-9]+", word) for word in quota):
            shares.append(int(quota[0]) / int(quota[1]))
    return min(shares, default=0.0)


def memory_limit_bytes() -> int:
    """Lowest memory limit of a control group; 0 without a limit."""
    limits = [text_of(folder / limit) for folder, _, limit in memory_groups(CGROUP_FILE, CGROUP_ROOT)]
    return min((int(text) for text in limits if text.isdigit() and int(text) < _NO_LIMIT_BYTES), default=0)


def limits(_runs: Path) -> Check:
    """Check the limits on open files and processes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    summary = f"{soft} open files"
    processes, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if processes != resource.RLIM_INFINITY:
        summary += f", {counted(processes, 'process', 'processes')}"
    if soft < _MIN_FILES:
        remedy = f"ulimit -n {hard}" if hard > soft else "ask the site for a higher limit of open files"
        return Check("degraded", f"{summary}: few for a job of many sockets", remedy)
    return Check("ok", summary)


def shared_memory(_runs: Path) -> Check:
    """Check /dev/shm, through which NCCL and data loaders communicate."""
    try:
        usage = shutil.disk_usage("/dev/shm")
    except OSError as error:
        return Check("degraded", f"/dev/shm is not there: {error.strerror}", "mount a tmpfs there (docker --shm-size)")
    summary = f"/dev/shm has {format_size(usage.free)} of {format_size(usage.total)} free"
    if usage.free < _MIN_SHM_BYTES:
        return Check("degraded", f"{summary}: data loaders and NCCL may fail", "docker run --shm-size=8g, or clear it")
    return Check("ok", summary)


def network(_runs: Path) -> Check:
    """Check that an interface other than loopback is up, and list the interfaces and their speeds."""
    up = []
    for name, row in sorted(psutil.net_if_stats().items()):
        if row.isup and name != "lo":
            speed = f" {row.speed / 1000:g} Gbit/s" if row.speed > 0 else ""
            up.append(name + speed)
    if not up:
        return Check("degraded", "no interface but loopback is up", "leave the network namespace (unshare, sandbox)")
    if words := gloo_on_loopback(os.environ):
        remedy = f"for a job of several hosts: export GLOO_SOCKET_IFNAME={up[0].split()[0]}"
        return Check("degraded", f"{', '.join(up)}; {words}", remedy)
    return Check("ok", ", ".join(up))


def gloo_on_loopback(environment: Mapping[str, str]) -> str:
    """Return a clause if Gloo would listen on loopback, as this host's name resolves to it; empty if it would not."""
    if environment.get("GLOO_SOCKET_IFNAME"):
        return ""
    host = socket.gethostname()
    with suppress(OSError):
        address = str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
        if ipaddress.ip_address(address.partition("%")[0]).is_loopback:
            return f"{host} resolves to {address}, where Gloo would listen and no other host can connect"
    return ""


CHECKS: tuple[tuple[str, str, Callable[[Path], Check]], ...] = (
    ("run", "clock", clock),
    ("run", "run directory", run_directory),
    ("node", "scheduler", scheduler),
    ("node", "cores", cores),
    ("node", "limits", limits),
    ("node", "shared memory", shared_memory),
    ("node", "network", network),
)
