"""The machines behind a sweep: kernel, processors, interfaces and settings, as each node's own file tells them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ringtap.analysis.runs import SweepRun
from ringtap.rundir import read_node
from ringtap.shapes import ShapeError, whole

_SETTINGS = ("net.ipv4.tcp_congestion_control", "net.ipv4.tcp_ecn", "net.ipv4.tcp_rmem", "net.ipv4.tcp_wmem")
_LOOPBACK = "lo"


def environment(sweep: SweepRun) -> dict[str, Any]:
    """What is known of the machines; plain values, absent ones left out or None.

    Returns:
        ``machines``: one item a node with ``node``, ``host``, ``kernel``, ``architecture``, ``python``, ``processors``,
        ``memory_bytes``, ``nics`` (``name``, ``speed_mbps``, ``mtu``, ``driver``, ``qdisc``, ``rate_bps``) and
        ``settings``; ``conductor``: the machine that ran the sweep; ``not_recorded``: collectors that failed, and why.
    """
    machines: dict[str, dict[str, Any]] = {}
    collectors: dict[tuple[str, str, str], set[str]] = {}
    for directory in dict.fromkeys(window["directory"] for window in sweep.windows):
        for path in sorted((sweep.path / directory / "nodes").glob("*/node.json")):
            item = _read(path)
            node, facts = whole(path.parent.name), _dict(item.get("before")) or _dict(item.get("after"))
            if facts and node not in machines:
                machines[node] = {"node": node, **_machine(facts)}
            for name, told in _dict(item.get("collectors")).items():
                state, reason = str(_dict(told).get("state", "?")), str(_dict(told).get("reason", ""))
                if state != "ok":
                    collectors.setdefault((str(name), state, reason), set()).add(node)
    host = _dict(_dict(sweep.info.get("calibration")).get("host"))
    return {
        "machines": [machines[node] for node in sorted(machines)],
        "conductor": {key: host.get(key) for key in ("name", "kernel", "python", "processors")} if host else None,
        "not_recorded": [
            {"what": f"{name} on {', '.join(sorted(nodes))}", "why": reason or state}
            for (name, state, reason), nodes in collectors.items()
        ],
    }


def _machine(facts: dict[str, Any]) -> dict[str, Any]:
    links = _dict(facts.get("links"))
    nics = [
        {
            "name": str(name),
            "speed_mbps": _dict(nic).get("speed") or None,
            "mtu": _dict(nic).get("mtu"),
            "driver": _dict(nic).get("driver"),
            "qdisc": _dict(links.get(name)).get("qdisc"),
            "rate_bps": _dict(links.get(name)).get("rate_bps"),
        }
        for name, nic in sorted(_dict(facts.get("nics")).items())
        if name != _LOOPBACK
    ]
    sysctls = _dict(facts.get("sysctls"))
    return {
        "host": facts.get("host"),
        "kernel": facts.get("kernel"),
        "architecture": facts.get("machine"),
        "python": facts.get("python"),
        "processors": facts.get("cpus"),
        "memory_bytes": facts.get("memory_bytes"),
        "nics": nics,
        "settings": {name: " ".join(str(sysctls[name]).split()) for name in _SETTINGS if sysctls.get(name) is not None},
    }


def _dict(item: Any) -> dict[str, Any]:
    return item if isinstance(item, dict) else {}


def _read(path: Path) -> dict[str, Any]:
    try:
        return read_node(path)
    except (OSError, ShapeError):
        return {}  # cut off while it was written: docs/run-directory.md lets a node end at any byte
