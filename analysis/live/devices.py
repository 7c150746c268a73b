"""Rates of network interfaces, RDMA ports and GPUs from the wide logs of a node."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from ringtap.analysis.live.recent_counters import RecentWideLog
from ringtap.analysis.live.run_state import NodeLog
from ringtap.analysis.live.snapshot import Gpu, Nic

_STALE_NS = 3 * 10**9
_OCTETS = re.compile(r"(\d+) octets?")
_LINK_RATE = re.compile(r"([\d.]+)\s*Gb/sec")
# ethtool: pause frames of the link and of each priority; packets with a congestion mark
_PAUSES = re.compile(r"[rt]x_(?:prio\d+_)?pause(?:_ctrl_phy|_frames)?")
_ECN_MARKS = ("rx_ecn_mark",)
_PORT_DROPS = ("port_xmit_discards", "hw.out_of_buffer")
_PORT_ERRORS = ("symbol_error", "port_rcv_errors", "link_error_recovery", "link_downed", "hw.packet_seq_err")
_PORT_PAUSES = ("hw.rp_cnp_handled", "hw.np_cnp_sent")
_PORT_MARKS = ("hw.np_ecn_marked_roce_packets",)


def nics_of(node: NodeLog) -> Iterator[Nic]:
    """Yield the node's network interfaces, loopback last."""
    home: dict[str, RecentWideLog] = {}
    files = sorted((file for (name, _), file in node.wide.items() if name == "nic"), key=lambda file: file.mono_ns)
    newest = files[-1].mono_ns if files else 0
    for file in files:
        if file.mono_ns >= newest - _STALE_NS:
            home |= {name.removesuffix(".tx_bytes"): file for name in file.layout.names if name.endswith(".tx_bytes")}
    for name in sorted(home, key=lambda name: (name == "lo", name)):
        yield _nic(node, name, home[name])


def _nic(node: NodeLog, name: str, file: RecentWideLog) -> Nic:
    ethtool = node.wide.get(("ethtool", name))
    pauses = marks = None
    if ethtool is not None:
        pauses = _sum(ethtool.rate(column) for column in ethtool.layout.names if _PAUSES.fullmatch(column))
        marks = _sum(ethtool.rate(column) for column in _ECN_MARKS)
    facts = (node.node.item.get("before") or {}).get("nics") or {}
    speed_mbps = (facts.get(name) or {}).get("speed") or 0
    limit_bps = ((node.node.item.get("before") or {}).get("links") or {}).get(name, {}).get("rate_bps")
    rates = [file.rate(f"{name}.{column}") for column in ("tx_bytes", "rx_bytes", "tx_packets", "rx_packets")]
    drops = [f"{name}.{direction}_drops" for direction in ("tx", "rx")]
    return Nic(
        node.name,
        name,
        "nic",
        None if rates[0] is None else rates[0] * 8,
        None if rates[1] is None else rates[1] * 8,
        rates[2],
        rates[3],
        _sum(file.rate(column) for column in drops),
        _sum(file.total(column) for column in drops),
        _sum(file.total(f"{name}.{direction}_errors") for direction in ("tx", "rx")),
        limit_bps or (speed_mbps * 1e6 if speed_mbps > 0 else None),
        pauses,
        marks,
    )


def ports_of(node: NodeLog) -> Iterator[Nic]:
    """Yield the ports of the node's RDMA devices."""
    for (collector, stem), file in sorted(node.wide.items()):
        if collector != "infiniband":
            continue
        yield Nic(
            node.name,
            f"{file.about.get('device', stem)}:{file.about.get('port', '')}".rstrip(":"),
            "rdma",
            _bits(file, "port_xmit_data"),
            _bits(file, "port_rcv_data"),
            file.rate("port_xmit_packets"),
            file.rate("port_rcv_packets"),
            _sum(file.rate(name) for name in _PORT_DROPS),
            _sum(file.total(name) for name in _PORT_DROPS),
            _sum(file.total(name) for name in _PORT_ERRORS),
            _speed_bps(file),
            _sum(file.rate(name) for name in _PORT_PAUSES),
            _sum(file.rate(name) for name in _PORT_MARKS),
        )


def _bits(file: RecentWideLog, name: str) -> float | None:
    """Return a data counter's rate in bit/s; its unit holds the number of octets per count."""
    rate = file.rate(name)
    if rate is None:
        return None
    octets = _OCTETS.match(file.layout.units.get(name, ""))
    return rate * 8 * (int(octets[1]) if octets else 1)


def _speed_bps(file: RecentWideLog) -> float | None:
    match = _LINK_RATE.match(str(file.about.get("rate") or ""))
    return float(match[1]) * 1e9 if match else None


def gpus_of(node: NodeLog) -> Iterator[Gpu]:
    """Yield the node's GPUs."""
    for (collector, stem), file in sorted(node.wide.items()):
        if collector != "gpu":
            continue
        share, power_mw = file.value("utilization_pct"), file.value("power_mw")
        yield Gpu(
            node.name,
            f"{stem.removeprefix('gpu')} {file.about.get('name', '')}".strip(),
            None if share is None else share / 100,
            file.value("memory_used_bytes"),
            None if power_mw is None else power_mw / 1000,
            *(_times8(_bytes_per_s(file, f"pcie_{direction}_bytes")) for direction in ("tx", "rx")),
            *(_times8(file.rate(f"nvlink_{direction}_bytes")) for direction in ("tx", "rx")),
        )


def _bytes_per_s(file: RecentWideLog, counter: str) -> float | None:
    """Return a counter's rate; older drivers provide a gauge of the rate instead."""
    rate = file.rate(counter)
    return file.value(f"{counter}_per_s") if rate is None else rate


def _times8(octets: float | None) -> float | None:
    return None if octets is None else octets * 8


def _sum(numbers: Iterable[float | None]) -> float | None:
    """Return the sum of the numbers that are known; None if none is."""
    known = [number for number in numbers if number is not None]
    return sum(known) if known else None
