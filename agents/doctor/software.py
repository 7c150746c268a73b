"""What ringtap itself can do here beside recording: the live view, the analysis, the testbed, cross traffic."""

from __future__ import annotations

import errno
import importlib.util
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

from ringtap.agents.doctor.node import on_alliance
from ringtap.collectors.base import Check
from ringtap.errors import RingtapError
from ringtap.installed import install_command

# what `traffic serve` and iperf3 listen on where nothing else is said
TRAFFIC_PORTS = (5001, 5201)


def _missing(packages: tuple[str, ...]) -> list[str]:
    return [name for name in packages if importlib.util.find_spec(name) is None]


def live(_runs: Path) -> Check:
    """Packages of the live view."""
    missing = _missing(("textual", "rich"))
    if missing:
        remedy = "pip install --no-index textual rich" if on_alliance() else install_command("tui")
        return Check("degraded", f"no {', '.join(missing)}: ringtap live --plain alone", remedy)
    return Check("ok", "ringtap live")


def analysis(_runs: Path) -> Check:
    """Packages of the analysis."""
    missing = _missing(("numpy", "pandas", "pyarrow", "scipy"))
    if missing:
        remedy = (
            "module load gcc arrow for pyarrow, pip install --no-index numpy pandas scipy"
            if on_alliance()
            else f"{install_command('report')}, here or where the run directory is copied to"
        )
        return Check("unavailable", f"no {', '.join(missing)}: runs are recorded, not analysed here", remedy)
    return Check("ok", "ringtap analyze, report, fit")


def lab(_runs: Path) -> Check:
    """Whether namespaces and links of the testbed can be made; this process has them to itself, and they go with it."""
    from ringtap.agents.lab import namespaces

    try:
        namespaces.isolate(namespaces.NEWNET | namespaces.NEWNS | namespaces.NEWPID | namespaces.NEWUTS)
    except RingtapError as error:
        return Check("unavailable", str(error).partition(": ")[0], str(error).partition(": ")[2])
    try:
        from pyroute2 import IPRoute, NetlinkError
    except ImportError:
        return Check("unavailable", "no pyroute2", install_command())
    with IPRoute() as netlink:
        for kind, module, action in (
            ("veth", "veth", lambda: netlink.link("add", ifname="doctor0", kind="veth", peer={"ifname": "doctor1"})),
            ("bridge", "bridge", lambda: netlink.link("add", ifname="doctor2", kind="bridge")),
            ("tbf", "sch_tbf", lambda: _limit(netlink)),
        ):
            try:
                action()
            except NetlinkError as error:
                remedy = f"modprobe {module}, or another kernel"
                return Check("unavailable", f"this kernel makes no {kind}: {error}", remedy)
    return Check("ok", "network namespaces, links and rate limits can be made")


def _limit(netlink: object) -> None:
    index = netlink.link_lookup(ifname="doctor0")[0]  # type: ignore[attr-defined]
    netlink.tc("add", "tbf", index, rate=1_000_000, burst=65_536, limit=400_000)  # type: ignore[attr-defined]


def traffic(_runs: Path) -> Check:
    """Whether the usual ports of the traffic generators are free."""
    return traffic_on(TRAFFIC_PORTS)


def traffic_on(ports: tuple[int, ...]) -> Check:
    """Whether TCP ports are free."""
    taken = []
    for port in ports:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
            try:
                sock.bind(("0.0.0.0", port))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    return Check("unavailable", f"no TCP socket can be bound: {error.strerror}", "leave the sandbox")
                taken.append(str(port))
    if taken:
        remedy = "ss -ltnp shows who listens; or ringtap traffic serve --bind HOST:PORT with another"
        return Check("degraded", f"TCP port {', '.join(taken)} is in use", remedy)
    return Check("ok", f"ringtap traffic; TCP ports {' and '.join(str(port) for port in ports)} are free")


def iperf3(_runs: Path) -> Check:
    """Whether iperf3 is there."""
    program = shutil.which("iperf3")
    if program is None:
        remedy = "module load iperf3 if the site has it, or" if on_alliance() else "install iperf3, or"
        return Check("unavailable", "iperf3 is not on the PATH", f"{remedy} plan no traffic of the kind iperf")
    return Check("ok", program)


CHECKS: tuple[tuple[str, Callable[[Path], Check]], ...] = (
    ("live", live),
    ("analysis", analysis),
    ("lab", lab),
    ("traffic", traffic),
    ("iperf3", iperf3),
)
