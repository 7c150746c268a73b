"""Filters take what tcpdump takes, packet for packet."""

import subprocess

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringtap.analysis.pcap.read import read_captures
from ringtap.errors import UsageError
from tests.unit.capture_makers import A4, A6, B4, B6, C4, classic, frames, spaced, udp, usual, vxlan

PACKETS = [*usual(), *spaced([udp(C4, B4, (port, 5001), port % 1000) for port in (1, 40001, 65535)], 3_000)]


@pytest.fixture(scope="module")
def capture(tmp_path_factory):
    path = tmp_path_factory.mktemp("filters") / "usual.pcap"
    path.write_bytes(classic(frames(sorted(PACKETS))))
    return path


@pytest.fixture(scope="module")
def traffic(capture):
    return read_captures(capture)


def by_tcpdump(capture, words):
    """Packets that tcpdump takes; None if it refuses the filter."""
    done = subprocess.run(
        ["tcpdump", "-n", "-r", capture, "--count", words], capture_output=True, text=True, check=False, timeout=20
    )
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
    "words", ["tcp[13] & 2 != 0", "len > 5", "less 100", "vlan and tcp", "ether host 1", "arp or tcp"]
)
def test_what_needs_packets_is_refused_with_the_way_to_it(traffic, words):
    with pytest.raises(UsageError, match=r"tcpdump -r FILE -w PART"):
        traffic.select(words)


@pytest.mark.parametrize(
    "words", ["", "  ", "(" * 5000 + "tcp" + ")" * 5000, "not " * 5000 + "tcp", "ha\0llo", "\ud800"]
)
def test_any_text_is_refused_in_a_sentence(traffic, words):
    with pytest.raises(UsageError):
        traffic.select(words)


@settings(max_examples=60, deadline=None)
@given(words=st.text(alphabet=st.sampled_from("()!&|/\\-.: 10a"), max_size=30) | st.text(max_size=20))
def test_no_text_breaks_the_parser(traffic, words):
    try:
        assert traffic.select(words).flow_numbers.size
    except UsageError as error:
        assert str(error)


def test_no_match_says_what_there_was(traffic):
    with pytest.raises(
        UsageError, match=r"no packet matches 'host 10.9.9.9': there are \d+ conversations, the largest tcp"
    ):
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
    assert traffic.selected.all()
