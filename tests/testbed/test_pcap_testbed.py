"""Real captures by tcpdump between network namespaces, with and without offload: `ringtap flows` against tshark and
against what the sockets counted.
"""

import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from tests.unit.analysis.pcap.test_scan_beside_tshark import by_ringtap, tshark
from tests.unit.capture_makers import udp, vlan

pytestmark = [pytest.mark.shares, pytest.mark.usefixtures("unchanged_machine")]
ROOT = Path(__file__).resolve().parents[2]
# two network namespaces with a veth pair between; they end with the last process in them
PAIR = """
ip link set lo up
unshare --net sleep 60 & peer=$!
while [ "$(readlink /proc/$peer/ns/net)" = "$(readlink /proc/self/ns/net)" ]; do sleep 0.02; done
ip link add eth0 type veth peer name eth0 netns $peer
ends='ip address add 10.9.0.$1/24 dev eth0; ip address add fd00::$1/64 dev eth0 nodad; ip link set eth0 up'
sh -c "$ends" sh 1; nsenter -t $peer -n sh -c "$ends" sh 2
"$@" $peer; code=$?
kill $peer; exit $code
"""
# connects, sends, and prints what the kernel counted: bytes sent, of them again, segments with data
SEND = """
import json, socket, struct, sys
client = socket.create_connection((sys.argv[1], int(sys.argv[2])))
client.sendall(bytes(int(sys.argv[3])))
client.shutdown(socket.SHUT_WR)
client.recv(1)
info = client.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 240)
print(json.dumps({"port": client.getsockname()[1], "sent": struct.unpack_from("Q", info, 200)[0],
                  "again": struct.unpack_from("Q", info, 208)[0]}))
"""
IN_A_PAIR = """
import json, os, signal, socket, struct, subprocess, sys, time
from pathlib import Path
folder, offload, peer = sys.argv[1:]
os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])  # on one processor, packets reach a capture in their order
there = ["nsenter", "-t", peer, "-n"]
if offload == "off":
    for place in ([], there):
        subprocess.run([*place, "ip", "link", "set", "eth0", "gso_max_segs", "1"], check=True)
dumps = []
for name, interface, words in (("eth", "eth0", []), ("any", "any", []), ("snap", "eth0", ["-s", "96", "--nano"])):
    command = ["tcpdump", "-i", interface, "-n", "-U", "-Z", "root", "-B", "32768", *words]
    dump = subprocess.Popen([*command, "-w", f"{folder}/{name}.pcap"], stderr=subprocess.PIPE, text=True)
    while "listening on" not in dump.stderr.readline():
        assert dump.poll() is None
    dumps.append(dump)
found = []
places = (socket.AF_INET, "10.9.0.1", 5001, 3_000_000), (socket.AF_INET6, "fd00::1", 5002, 400_000)
for family, address, port, size in places:
    server = socket.create_server((address, port), family=family)
    sender = subprocess.Popen([*there, sys.executable, "-c", SEND, address, str(port), str(size)], stdout=-1)
    connection, _ = server.accept()
    received = 0
    while data := connection.recv(1 << 20):
        received += len(data)
    connection.close()
    found.append(json.loads(sender.communicate()[0]) | {"to": port, "received": received, "size": size})
datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
datagrams.bind(("10.9.0.1", 6000))
for size in (0, 100, 1400):
    datagrams.sendto(bytes(size), ("10.9.0.2", 6001))
wire = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
wire.bind(("eth0", 0))
for frame in TAGGED:
    wire.send(frame)
captures, ports, end_s = list(Path(folder).glob("*.pcap")), struct.pack(">HH", 7000, 7001), time.monotonic() + 30
# the kernel hands over what it has within a second
while any(path.read_bytes().count(ports) < len(TAGGED) for path in captures) and time.monotonic() < end_s:
    time.sleep(0.1)
for dump in dumps:
    dump.send_signal(signal.SIGINT)
dropped = [line for dump in dumps for line in dump.communicate()[1].splitlines() if "dropped by kernel" in line]
print(json.dumps({"transfers": found, "dropped": dropped}))
"""


def flows(path: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "ringtap.cli", "flows", str(path), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def by_frames(path: Path) -> dict[tuple[str, frozenset[tuple[str, int]]], dict[tuple[str, int], tuple[int, int]]]:
    """tshark's frames, summed by conversation: its tables round from 10 kB on."""
    names = ("frame.len", "ip.src", "ipv6.src", "ip.dst", "ipv6.dst")
    names += ("tcp.srcport", "tcp.dstport", "udp.srcport", "udp.dstport")
    found: dict[Any, dict[Any, tuple[int, int]]] = defaultdict(dict)
    for line in tshark(path, "-T", "fields", *(word for name in names for word in ("-e", name))).splitlines():
        size, ip, ipv6, to, to6, tcp, tcp_to, udp_from, udp_to = line.split("\t")
        if (tcp or udp_from) and "," not in ip:  # ICMP quotes what it is about
            ends = (ip or ipv6, int(tcp or udp_from)), (to or to6, int(tcp_to or udp_to))
            ways = found["tcp" if tcp else "udp", frozenset(ends)]
            before = ways.get(ends[0], (0, 0))
            ways[ends[0]] = before[0] + 1, before[1] + int(size)
            ways.setdefault(ends[1], (0, 0))
    return dict(found)


@pytest.mark.needs_root("join another network namespace here")
@pytest.mark.parametrize("offload", ["on", "off"])
def test_what_tcpdump_wrote(offload: str, tmp_path: Path) -> None:
    datagrams = [udp("10.9.7.1", "10.9.7.2", (7000, 7001), size) for size in (1, 50, 1400)]
    tagged = [vlan(*tags)(datagram) for datagram in datagrams for tags in ((0x8100,), (0x88A8, 0x8100))]
    script = f"SEND, TAGGED = {SEND!r}, {tagged!r}\n{IN_A_PAIR}"
    command = ["unshare", "--net", "sh", "-c", PAIR, "sh", sys.executable, "-c", script, str(tmp_path), offload]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert all(line.startswith("0 ") for line in told["dropped"]), told["dropped"]
    for name in ("eth", "any", "snap"):
        found = flows(tmp_path / f"{name}.pcap")
        assert by_ringtap(found) == by_frames(tmp_path / f"{name}.pcap"), name
        assert found["counts"]["packets"] > 0
        assert {"tcp", "udp"} <= {one["protocol"] for one in found["conversations"]}
        assert any(one["a_port"] == 7000 and one["packets_ab"] == 6 for one in found["conversations"]), name
        for transfer in told["transfers"]:
            (one,) = (one for one in found["conversations"] if transfer["to"] in (one["a_port"], one["b_port"]))
            way = "ab" if one["b_port"] == transfer["to"] else "ba"
            assert transfer["received"] == transfer["size"]
            assert one[f"payload_{way}"] == transfer["sent"], (name, transfer)
            assert one[f"retransmitted_bytes_{way}"] == transfer["sent"] - transfer["size"], (name, transfer)
            assert one["handshake_ns"] > 0
            if name == "eth":
                # of the wire: MTU 1500 less IP, TCP and its timestamps
                mss = 1428 if transfer["to"] == 5002 else 1448
                assert one[f"segments_{way}"] >= transfer["size"] / mss
                assert (one[f"data_packets_{way}"] >= one[f"segments_{way}"]) == (offload == "off")
