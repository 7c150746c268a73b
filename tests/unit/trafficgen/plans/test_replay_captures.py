"""Replay of captures: the plans are to the byte those that version 0.1 wrote, whose reader was another one."""

import json
import random
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import pytest
from scapy.layers.inet import IP, TCP
from scapy.packet import Raw

import ringtap
from ringtap.analysis.pcap.read_payload_packets import read_segments
from ringtap.core.errors import UsageError
from ringtap.core.flow_plan_file import write_plan
from ringtap.trafficgen.plans.registry import make_plan
from tests.unit.capture_makers import (
    A4,
    A6,
    B4,
    B6,
    C4,
    LOOP,
    MS,
    NULL,
    RAW,
    SLL,
    SLL2,
    US,
    Packet,
    Talk,
    arp,
    bare,
    classic,
    cooked,
    cooked2,
    ethernet,
    frames,
    null,
    spaced,
    udp,
    usual,
    vlan,
    vxlan,
)

pytestmark = pytest.mark.shares

GOLD = Path(__file__).resolve().parents[3] / "gold" / "replay.json"
TO = ["10.9.0.1:5001", "10.9.0.2:5002", "[fd00::9]:5003"]


def talks() -> list[tuple[int, bytes]]:
    """Two connections between the same hosts, both ways, with repeats, gaps in the numbers, and numbers that wrap."""
    one = Talk(A4, B4, (40001, 5001)).open().data(0, *[1448] * 6).wait(3 * MS)
    one.put(0, one.next[0] - 1448, 1448).put(0, one.next[0] - 2896, 2896).wait(US)
    one.put(0, one.next[0] + 1448, 1448).data(0, 1448, 7).data(1, 5, 900).wait(250 * MS)
    one.data(0, 1000).data(1, 1).close()
    two = Talk(B4, A4, (40002, 5001)).wait(30 * US).open().data(1, 20, 1448).wait(99 * MS).data(0, 64, 1448).close()
    return sorted([*one.packets, *two.packets], key=lambda found: found[0])


def six() -> list[tuple[int, bytes]]:
    one = Talk(A6, B6, (40003, 443)).open(mss=1440).data(0, *[1428] * 5).data(1, 33).wait(120 * MS).data(0, 9)
    return one.packets


def many() -> list[Packet]:
    """Ends and pauses at random; some times are equal, some go back."""
    rng = random.Random(11)
    made, now_ns = [], 0
    for _ in range(300):
        now_ns += rng.choice((0, 0, 1_000, 40_000, 3 * MS, -5_000, 30 * MS))
        source, to = rng.sample([A4, B4, C4, "10.1.0.9", "172.16.0.1"], 2)
        ports = rng.randrange(40000, 40004), rng.randrange(5001, 5003)
        tcp = TCP(sport=ports[0], dport=ports[1], seq=rng.randrange(2**32), flags="A")
        made.append((max(now_ns, 0), bytes(IP(src=source, dst=to) / tcp / Raw(bytes(rng.choice((0, 1, 512, 1448)))))))
    return frames(made)


def offloaded() -> list[Packet]:
    """Packets without a length in their IP header (BIG TCP), of which the capture kept the headers."""
    made = frames(talks())
    cut = [Packet(one.time_ns, one.data[:16] + b"\0\0" + one.data[18:90], one.length + 150_000) for one in made]
    return [one if len(one.data) < 80 else two for one, two in zip(made, cut, strict=True)]


def mixed() -> list[Packet]:
    """Connections among what is none of theirs: UDP, ARP, tunnels, fragments without their first."""
    inner = ethernet(talks()[3][1])
    others = [udp(A4, B4, (9, 9), 100), vxlan(inner), bytes(IP(src=A4, dst=B4, frag=9, proto=6) / Raw(bytes(80)))]
    made = frames(sorted([*talks(), *spaced(others * 5, 70 * US), *six()]))
    return [made[0], Packet(made[0].time_ns, arp(), 60), *made[1:]]


def cut(size: int) -> bytes:
    return classic([one.cut(size) for one in mixed()])


# made in the tests: Scapy takes a second, and every worker of xdist reads this file
CASES: dict[str, Callable[[], bytes]] = {
    "usual": lambda: classic(frames(usual())),
    "talks": lambda: classic(frames(talks())),
    "nanoseconds": lambda: classic(frames(talks()), nano=True),
    "big_endian": lambda: classic(frames(talks()), order=">"),
    "six": lambda: classic(frames(six())),
    "vlan": lambda: classic(frames(talks(), vlan(0x8100))),
    "vlans_six": lambda: classic(frames(six(), vlan(0x88A8, 0x8100))),
    "cooked": lambda: classic(frames(talks(), cooked), SLL),
    "cooked2_six": lambda: classic(frames(six(), cooked2), SLL2),
    "null": lambda: classic(frames(talks(), null("<")), NULL),
    "null_six": lambda: classic(frames(six(), null("<", 30)), NULL),
    "loop": lambda: classic(frames(talks(), null(">")), LOOP),
    "raw": lambda: classic(frames([*talks(), *six()], bare), RAW),
    "mixed": lambda: classic(mixed()),
    "many": lambda: classic(many(), nano=True),
    "offloaded": lambda: classic(offloaded()),
    **{f"cut{size}": partial(cut, size) for size in (33, 38, 46, 47, 54, 68, 96)},
}
GIVEN = {
    "": {"to": TO},
    "_gap": {"to": TO[:1], "gap": 50 * US, "from": ["10.8.0.1", "10.8.0.2"]},
    "_scaled": {"to": TO[:2], "gap": 10 * MS, "scale": 7.5, "duration": 200 * MS, "seed": 3},
}


@cache
def capture(case: str) -> bytes:
    return CASES[case]()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("given", GIVEN)
def test_a_capture_gives_the_plan_it_always_gave(tmp_path: Path, case: str, given: str) -> None:
    path, plan, expected = tmp_path / f"{case}.pcap", tmp_path / "plan", json.loads(GOLD.read_text())[case + given]
    path.write_bytes(capture(case))
    options = {"replay": path, **GIVEN[given]}
    if expected is None:
        with pytest.raises(UsageError, match="there is no flow to replay"):
            make_plan("replay", options, read_segments)
        return
    write_plan(make_plan("replay", options, read_segments), plan)
    header, *flows = plan.read_text().splitlines()
    about = json.loads(header)
    assert about.pop("ringtap") == ringtap.__version__  # not in plans of 0.1
    assert [json.dumps(about), *flows] == expected
