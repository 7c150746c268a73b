"""Typical Python loops with dpkt or scapy that count packets and bytes of each 5-tuple.

python benchmarks/_pcap_loops.py dpkt|scapy FILE; the last line contains the packets and the time of the loop.
"""

from __future__ import annotations

import json
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

Flows = dict[tuple[Any, ...], list[int]]


def with_dpkt(path: Path, flows: Flows) -> int:
    """Count packets and bytes in the style of dpkt's own examples; return the number of packets."""
    import dpkt

    packets = 0
    with path.open("rb") as file:
        for _, data in dpkt.pcap.Reader(file):
            packets += 1
            ip = dpkt.ethernet.Ethernet(data).data
            if isinstance(ip, dpkt.ip.IP) and isinstance(ip.data, (dpkt.tcp.TCP, dpkt.udp.UDP)):
                flow = flows[ip.src, ip.dst, ip.p, ip.data.sport, ip.data.dport]
                flow[0] += 1
                flow[1] += ip.len + 14
    return packets


def with_scapy(path: Path, flows: Flows) -> int:
    """Count packets and bytes in the style of scapy's own examples; return the number of packets."""
    from scapy.layers.inet import IP, TCP, UDP
    from scapy.layers.l2 import Ether  # noqa: F401 -- its import registers it with the reader
    from scapy.utils import PcapReader

    packets = 0
    with PcapReader(str(path)) as reader:
        for packet in reader:
            packets += 1
            if IP in packet:
                ip = packet[IP]
                transport = packet[TCP] if TCP in packet else packet[UDP]
                flow = flows[ip.src, ip.dst, ip.proto, transport.sport, transport.dport]
                flow[0] += 1
                flow[1] += packet.wirelen
    return packets


def main() -> None:
    """Run the command line above."""
    flows: Flows = defaultdict(lambda: [0, 0])
    loop = {"dpkt": with_dpkt, "scapy": with_scapy}[sys.argv[1]]
    begun_s = time.perf_counter()
    packets = loop(Path(sys.argv[2]), flows)
    print(json.dumps({"packets": packets, "loop_s": time.perf_counter() - begun_s, "flows": len(flows)}))


if __name__ == "__main__":
    main()
