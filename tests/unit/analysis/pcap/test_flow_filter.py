"""Filters take what tcpdump takes, packet for packet."""

import subprocess

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scapy.layers.inet import IP, TCP
from scapy.layers.inet6 import IPv6
from scapy.packet import Raw

from ringtap.analysis.pcap.scan_captures import read_captures
from ringtap.analysis.pcap.scan_dtypes import is_ip
from ringtap.core.errors import UsageError
from tests.unit.capture_makers import (
    A4,
    A6,
    B4,
    B6,
    C4,
    START_NS,
    Packet,
    arp,
    classic,
    frames,
    spaced,
    udp,
    usual,
    vxlan,
)

pytestmark = [pytest.mark.computes, pytest.mark.long, pytest.mark.together]

PACKETS = [*usual(), *spaced([udp(C4, B4, (port, 5001), port % 1000) for port in (1, 40001, 65535)], 3_000)]
for _number in (0, 2, 47, 50, 51, 103, 112):
    PACKETS += spaced([bytes(IP(src=A4, dst=B4, proto=_number) / Raw(bytes(30)))] * 2, 4_000)
for _number in (2, 50, 103, 112):
    PACKETS += spaced([bytes(IPv6(src=A6, dst=B6, nh=_number) / Raw(bytes(30)))], 4_100)
_LLDP = bytes(12) + b"\x88\xcc" + bytes(46)
_RARP = arp().replace(b"\x08\x06", b"\x80\x35", 1)
NOT_IP = [Packet(START_NS + 990_000 + place, data, 60) for place, data in enumerate((arp(), _RARP, _LLDP, arp()))]


@pytest.fixture(scope="module")
def capture(tmp_path_factory):
    path = tmp_path_factory.mktemp("filters") / "usual.pcap"
    path.write_bytes(classic([*frames(sorted(PACKETS)), *NOT_IP]))
    return path


@pytest.fixture(scope="module")
def traffic(capture):
    return read_captures(capture)


def by_tcpdump(capture, words, *options):
    """Packets that tcpdump takes; None if it refuses the filter."""
    command = ["tcpdump", *options, "-n", "-r", capture, "--count", words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    if "expression rejects all packets" in done.stderr:
        return 0
    return int(done.stdout.split()[0]) if done.returncode == 0 else None


def by_ringtap(traffic, words):
    """Likewise; sums of the conversations, which must be those of the bins."""
    try:
        chosen = traffic.select(words)
    except UsageError as error:
        if "no packet matches" in str(error):
            return 0
        return None
    table = chosen.conversations()
    total = int(table["packets_ab"].sum() + table["packets_ba"].sum())
    assert total == chosen.binned(what="packets").sum() == chosen.flows()["packets"].sum()
    return total


HOSTS = (A4, B4, C4, A6, B6, "10.9.9.9", "10.1")
NETS = ("10", "10.1", "10.1.0.0/16", "10.1.0.2/31", "0.0.0.0/0", "fd00::/64", "fd00::2/128", "::/0", f"{C4}")
NETS = (*NETS, "10.1.0.0 mask 255.255.255.252")
PORTS = ("5001", "40001", "53", "443", "0", "0x50", "domain", "65535")
RANGES = ("1-100", "40001-40002", "6000-5001", "80", "0-65535")


def primitives(kind, values, names):
    sides = ("", "src", "dst", "src or dst", "src and dst", "dst or src", "dst and src")
    parts = st.tuples(st.sampled_from(names), st.sampled_from(sides), st.just(kind), st.sampled_from(values))
    return parts.map(lambda found: " ".join(part for part in found if part))


single = st.one_of(
    primitives("host", HOSTS, [""]),
    primitives("net", NETS, [""]),
    primitives("port", PORTS, ["", "tcp", "udp"]),
    primitives("portrange", RANGES, ["", "tcp", "udp"]),
    st.sampled_from(
        ["tcp", "udp", "icmp", "icmp6", "ip", "ip6", "proto 17", r"proto \tcp", "ip proto 6", "ip6 proto 6"]
    ),
    st.sampled_from(["src 10.1.0.1", "dst 10.1.0.3", "ip host 10.1.0.1", "ip6 host fd00::1", "ip6 net fd00::/127"]),
    # what follows a primitive goes with its words
    st.sampled_from(["host 10.1.0.1 and 10.1.0.2", "port 53 or 5001", "tcp src port 5001 or 443 or not 40001"]),
    st.sampled_from(
        ["host (10.1.0.1 or 10.1.0.3)", "src (10.1.0.1 or not 10.1.0.2)", "dst port (53 or (443 or 7000))"]
    ),
)
whole = st.recursive(
    single,
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["and", "or", "&&", "||"]), inner).map(" ".join),
        st.tuples(st.sampled_from(["not ", "! ", "!", "not not "]), inner).map("".join),
        inner.map("({})".format),
        inner.map("not ({})".format),
    ),
    max_leaves=6,
)


@settings(max_examples=150, deadline=None)
@given(words=whole)
def test_filters_take_what_tcpdump_takes(capture, traffic, words):
    assert by_ringtap(traffic, words) == by_tcpdump(capture, words)


CUT_AT = (34, 35, 36, 37, 38, 40, 41, 42, 54)


@pytest.fixture(scope="module")
def cut_captures(tmp_path_factory):
    """The packets whose IPv4 header is there whole, of other packets what there is, and cut ARP."""
    path = tmp_path_factory.mktemp("cut")
    kept = [one for one in frames(sorted(PACKETS)) if one.data[12:14] == b"\x08\x00"]
    made = {}
    for size in CUT_AT:
        capture = path / f"cut{size}.pcap"
        capture.write_bytes(classic([one.cut(size) for one in (*kept, *NOT_IP)]))
        made[size] = capture, read_captures(capture)
    return made


@settings(max_examples=150, deadline=None)
@given(words=whole, size=st.sampled_from(CUT_AT))
def test_a_filter_refuses_packets_where_it_looks_beyond_the_captured_bytes_as_tcpdump_does(cut_captures, words, size):
    """By the filter as it stands: tcpdump's optimizer (-O: without) leaves out looks that cannot change the outcome."""
    capture, traffic = cut_captures[size]
    assert by_ringtap(traffic, words) == by_tcpdump(capture, words, "-O")


@pytest.mark.parametrize("size", CUT_AT)
@pytest.mark.parametrize(
    "words",
    [
        f"src host {A4} and arp",
        f"not host {A4} and arp",
        f"not host {B4} and arp",
        f"arp and not dst host {B4}",
        f"not src net 10.1.0.0/24 or host {A4}",
        f"rarp src host {A4} or port 80",
        "not port 40001",
        "not dst port 40001",
        "not udp or src port 0",
        "tcp port 40001",
    ],
)
def test_a_senders_address_and_port_count_where_the_targets_are_cut(cut_captures, words, size):
    capture, traffic = cut_captures[size]
    assert by_ringtap(traffic, words) == by_tcpdump(capture, words)


def test_an_address_that_was_cut_off_is_none(cut_captures):
    _, traffic = cut_captures[34]
    found = traffic.select("arp or rarp").conversations()
    assert found[["protocol", "a", "b"]].to_numpy().tolist() == [["arp", A4, ""], ["rarp", A4, ""]]
    assert set(traffic.select("arp").flows()["destination"]) == {""}
    assert traffic.counts["cut_by_snap"] >= 3


REFUSED = (
    *("host", "and", "()", "tcp and (port 80", "tcp udp", "src tcp port 80", "(tcp or udp) port 53", "10.1.0.1"),
    *("tcp and 10.1.0.1", "(host 10.1.0.1) and 10.1.0.2", "host (10.1.0.1 or tcp)", "tcp host 10.1.0.1", "ip port 80"),
    *("icmp port 5", "port 99999", "port 080", "port 1-5", "port nosuchservice", "host 1.2.3.4.5", "ip6 host 10.1.0.1"),
    *("net 10.0.0.0/33", "net 10.1.2.3/8", "host 10.0.0.1/8", "net fd00::/129", "net 10.0.0.1 mask 255.0.0.0"),
    *("proto nonsense", "proto 1:2", "port 80 (tcp)", "not", "tcp and", "host ::g", "net nosuchnet", "tcp)", "!"),
)


@pytest.mark.parametrize("words", REFUSED)
def test_what_tcpdump_refuses_is_refused_in_a_sentence(capture, traffic, words):
    assert by_tcpdump(capture, words) is None
    with pytest.raises(UsageError) as refused:
        traffic.select(words)
    assert repr(words)[1:-1] in str(refused.value)
    assert "no packet matches" not in str(refused.value)


@pytest.mark.parametrize(
    "words", ["tcp[13] & 2 != 0", "len > 5", "less 100", "vlan and tcp", "ether host 1", "arp[0] = 1"]
)
def test_what_needs_packets_is_refused_with_the_way_to_it(traffic, words):
    with pytest.raises(UsageError, match=r"tcpdump -r FILE -w PART"):
        traffic.select(words)


@pytest.mark.parametrize(
    "words",
    ["", "  ", "(" * 10_000 + "tcp" + ")" * 10_000, "(" * 10_000, "not " * 5000 + "tcp", "ha\0llo", "\ud800"],
)
def test_any_text_is_refused_in_a_sentence(traffic, words):
    with pytest.raises(UsageError):
        traffic.select(words)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("tcp udp", "from 'udp' on, at character 5: expected 'and' or 'or'"),
        ("nonsense 80", "from 'nonsense' on, at character 1: expected a protocol, host, net, port"),
        ("10.1.0.1", "from '10.1.0.1' on, at character 1: expected a protocol, host, net, port"),
        ("tcp and (port 80", "ends too early: expected a closing parenthesis"),
        ("host (10.1.0.1 or tcp)", "from 'tcp' on, at character 19: expected a name or a number"),
        ("src", "ends too early: expected a name or a number"),
        ("tcp and 80", "has '80' with nothing that says what it is: write host, net or port before it"),
        ("tcp host 10.1.0.1", "puts 'tcp' before 'host', which takes only ip, ip6, arp, rarp"),
        ("(" * 10_000 + "tcp" + ")" * 10_000, "is nested too deep"),
    ],
)
def test_a_refusal_says_where_and_what_is_expected(traffic, words, sentence):
    with pytest.raises(UsageError) as refused:
        traffic.select(words)
    assert sentence in str(refused.value)


@pytest.mark.parametrize("words", ["(" * 200 + "tcp" + ")" * 200, "not " * 200 + "tcp", "tcp" + " or tcp" * 1000])
def test_long_and_nested_filters_are_read(traffic, words):
    assert by_ringtap(traffic, words) == by_ringtap(traffic, "tcp")


@settings(max_examples=60, deadline=None)
@given(words=st.text(alphabet=st.sampled_from("()!&|/\\-.: 10a"), max_size=30) | st.text(max_size=20))
def test_no_text_breaks_the_parser(traffic, words):
    try:
        assert traffic.select(words).flow_numbers.size
    except UsageError as error:
        assert str(error)


def test_no_match_says_what_there_was(traffic):
    with pytest.raises(UsageError, match=r"no packet matches 'host 10.9.9.9': the largest of \d+ conversations: tcp"):
        traffic.select("host 10.9.9.9")


def test_a_filter_looks_inside_of_tunnels_when_asked(tmp_path):
    ethernet = bytes(12) + b"\x08\x00"
    inner = [ethernet + udp("192.168.7.1", "192.168.7.2", (9, port), 100) for port in (10, 11)]
    path = tmp_path / "tunnel.pcap"
    path.write_bytes(classic(frames(spaced([*map(vxlan, inner), udp(A4, B4, (1, 2), 5)]))))
    traffic = read_captures(path)
    with pytest.raises(UsageError, match="no packet matches"):
        traffic.select("host 192.168.7.1")
    chosen = traffic.select("vxlan and host 192.168.7.1 and port 11")
    assert chosen.conversations()["inner"].tolist() == [True]
    assert chosen.binned(what="packets").sum() == 1
    assert len(traffic.select("vxlan").conversations()) == 2
    assert traffic.select("udp port 4789").binned(what="packets").sum() == 2
    # without a filter, inner packets do not count twice
    assert traffic.binned(what="packets").sum() == 3


def test_filters_narrow_one_another_and_leave_the_rest_as_it_is(traffic):
    twice = traffic.select(f"host {A4}").select("tcp")
    once = traffic.select(f"host {A4} and tcp")
    assert np.array_equal(twice.selected, once.selected)
    assert np.array_equal(traffic.selected, np.repeat(is_ip(traffic.scanned.conversations["kind"]), 2))


NAMED = ("igmp", "ah", "esp", "pim", "vrrp", "carp", "icmp", "icmp6", "sctp", "arp", "rarp", "ip proto 0", "proto 0")
NAMED = (*NAMED, f"arp host {A4}", f"arp src host {A4}", "rarp net 10.1", f"ip host {A4}", f"host {A4}", "net 10.1")


@pytest.mark.parametrize("words", [*NAMED, "ip6 proto 103", "ip", "ip6", "tcp", "net 0.0.0.0/0", "src net 0.0.0.0/0"])
@pytest.mark.parametrize("negated", [False, True])
def test_protocols_and_frames_that_are_no_ip_as_tcpdump_takes_them(capture, traffic, words, negated):
    words = f"not ({words})" if negated else words
    assert by_ringtap(traffic, words) == by_tcpdump(capture, words)


def test_without_a_filter_frames_that_are_no_ip_are_in_the_totals_only(traffic):
    assert traffic.counts["not_ip"] == len(NOT_IP)
    assert "arp" not in traffic.conversations()["protocol"].tolist()
    assert traffic.select("arp or rarp").conversations()["protocol"].tolist() == ["arp", "rarp"]
    assert traffic.select("not ip and not ip6").binned(what="packets").sum() == len(NOT_IP)


@pytest.mark.parametrize(
    "words", ["port 0", "src port 0", "portrange 0-1023", "tcp portrange 0-65535", "udp dst port 0"]
)
def test_ports_that_are_not_in_the_capture_match_no_port(tmp_path, words):
    """Packets cut before their ports, and fragments without their first; a port of 0 is one."""
    ports_0 = [udp(A4, B4, (0, 0), 9), bytes(IP(src=A4, dst=B4) / TCP(sport=0, dport=0, flags="A"))]
    cut = [bytes(IP(src=A4, dst=B4) / TCP(sport=5, dport=6)), udp(A4, C4, (53, 53), 9)]
    later = bytes(IP(src=A4, dst=C4, frag=3, proto=17) / Raw(bytes(40)))
    path = tmp_path / "cut.pcap"
    path.write_bytes(classic([*[one.cut(34) for one in frames(spaced(cut))], *frames(spaced([*ports_0, later]))]))
    traffic = read_captures(path)
    assert by_ringtap(traffic, words) == by_tcpdump(path, words)
    assert traffic.counts["cut_by_snap"] == 2
