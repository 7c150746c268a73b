"""Reads NCCL's log with NCCL_DEBUG=INFO: transports, interfaces, rings."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from ringtap.core.untrusted_files import open_regular

# host:pid:tid [device] NCCL INFO text; a warning names its source first; newer releases begin with a time
_LINE = re.compile(
    r"(?<![\w.-])(?P<host>[\w.-]{1,255}):\d+:\d+ \[-?\d+\] (?:\S+:\d+ )?NCCL (?P<level>\w+) (?P<text>.*)"
)
_VERSION = re.compile(r"NCCL version ([\d.]+\S*)")
_NETWORK = re.compile(r"Using network (\S+)")
_NET = re.compile(r"NET/(\w+) ?: Using (.*)")
_INTERFACE = re.compile(r"\[(\d{1,9})\]([^:\s]{1,64}):(\S{1,128})")
_RING = re.compile(r"(?:Channel|Ring) ([0-9]{1,9})(?:/\d+)? :((?: +[0-9]{1,9})+)$")
_LINK = re.compile(
    r"(?:Channel|Ring) ([0-9]{1,9})(?:/\d+)? : (\d+)\[[^\]]*\] -> (\d+)\[[^\]]*\](?: \[(\w+)\])? via (\S+)"
)
_MAX_LINE_BYTES = 1 << 16
_RANK = re.compile(r"\brank ([0-9]{1,9}) nranks ([0-9]{1,9})\b")


def read_nccl(path: Path) -> dict[str, Any]:
    """Read one process's log.

    Returns:
        ``file``, ``host``, ``version`` and ``network`` (empty if not in the log), ``interfaces`` (``[{network, name,
        address}]``), ``rank`` and ``ranks`` (None if not in the log), ``rings`` (ranks in order, one ring per channel),
        ``links`` (``{"0 -> 1": "NET/Socket/0"}``: transport from rank 0 to rank 1) and ``warnings`` (NCCL's own).
    """
    found: dict[str, Any] = {"file": path.name, "host": "", "version": "", "network": "", "interfaces": []}
    found |= {"rank": None, "ranks": None, "rings": {}, "links": {}, "warnings": []}
    with open_regular(path) as file:
        lines = [raw.decode(errors="replace").rstrip() for raw in iter(lambda: file.readline(_MAX_LINE_BYTES), b"")]
    for line in lines:
        version = _VERSION.search(line)
        if version:
            found["version"] = version[1]
        match = _LINE.search(line)
        if match:
            found["host"] = match["host"]
            _parse(match["level"], match["text"].strip(), found)
    found["rings"] = [ranks for _, ranks in sorted(found["rings"].items())]
    return found


def _parse(level: str, text: str, found: dict[str, Any]) -> None:
    if level == "WARN":
        found["warnings"].append(text)
    network, net, rank = _NETWORK.search(text), _NET.match(text), _RANK.search(text)
    if network:
        found["network"] = network[1]
    if net:
        known = {(item["network"], item["name"]) for item in found["interfaces"]}
        for _, name, address in _INTERFACE.findall(net[2]):
            if (net[1], name) not in known:
                found["interfaces"].append({"network": net[1], "name": name, "address": address.partition("<")[0]})
    if rank:
        found["rank"], found["ranks"] = int(rank[1]), int(rank[2])
    ring, link = _RING.match(text), _LINK.match(text)
    if ring:
        found["rings"][int(ring[1])] = [int(number) for number in ring[2].split()]
    if link:
        found["links"][f"{link[2]} -> {link[3]}"] = link[5]
