"""Sums and rates of captures against those of the packets that were put into them."""

import random

import numpy as np
import pandas as pd
import pytest

from ringtap.analysis.pcap import captured_traffic as traffic_module
from ringtap.analysis.pcap.scan_captures import read_captures
from ringtap.core.errors import UsageError
from tests.unit.capture_makers import A4, A6, B4, B6, C4, MS, START_NS, Talk, classic, frames, roce, spaced, udp, usual

pytestmark = [pytest.mark.computes, pytest.mark.together]

# flow -> (source, destination, ports); two directions of the first conversation
FLOWS = [(A4, B4, (7, 5001)), (B4, A4, (5001, 7)), (A4, C4, (8, 5001)), (C4, B4, (9, 5001)), (A6, B6, (7, 7))]
HEADERS = {A4: 14 + 20 + 8, B4: 42, C4: 42, A6: 14 + 40 + 8}


@pytest.fixture(scope="module")
def packets():
    """Time after the start, flow and payload of each packet, in no even pace; some carry none."""
    dice = random.Random(7)
    return sorted(
        (dice.randrange(60 * MS), dice.randrange(len(FLOWS)), dice.choice((0, 1, 700, 1472))) for _ in range(900)
    )


@pytest.fixture(scope="module")
def capture(packets, tmp_path_factory):
    path = tmp_path_factory.mktemp("traffic") / "udp.pcap"
    made = [(at_ns, udp(*FLOWS[flow][:2], FLOWS[flow][2], size)) for at_ns, flow, size in packets]
    path.write_bytes(classic(frames(made), nano=True))
    return path


@pytest.fixture(scope="module")
def traffic(capture):
    return read_captures(capture)


@pytest.fixture(scope="module")
def truth(packets):
    rows = []
    for at_ns, flow, size in packets:
        source, destination, ports = FLOWS[flow]
        whole = max(60, HEADERS[source] + size)  # the least frame of Ethernet
        amounts = (whole, size, whole if size else 0, 1, int(size > 0))
        rows.append((START_NS + at_ns, source, ports[0], destination, ports[1], *amounts))
    names = ("t_ns", "source", "source_port", "destination", "destination_port")
    return pd.DataFrame(rows, columns=[*names, "bytes", "payload", "data_bytes", "packets", "data_packets"])


def number_of(traffic, flow):
    table = traffic.flows()
    source, destination, ports = FLOWS[flow]
    mine = (table["source"] == source) & (table["destination"] == destination) & (table["source_port"] == ports[0])
    (number,) = table.index[mine]
    return int(number)


def test_flows_and_conversations_add_up(traffic, truth):
    keys = ["source", "source_port", "destination", "destination_port"]
    wanted = truth.groupby(keys)[list(traffic_module.AMOUNTS)].sum()
    flows = traffic.flows()
    found = flows.set_index(keys)[list(traffic_module.AMOUNTS)]
    pd.testing.assert_frame_equal(found.sort_index(), wanted, check_dtype=False)
    conversations = traffic.conversations()
    assert len(conversations) == 4
    assert traffic.counts["packets"] == conversations.filter(regex=r"^packets_").to_numpy().sum() == len(truth)
    for number in flows.index:
        way = ("ab", "ba")[number % 2]
        assert conversations.loc[number // 2, f"payload_{way}"] == flows.loc[number, "payload"]
    assert conversations["first_ns"].min() == truth["t_ns"].min()
    assert conversations["last_ns"].max() == truth["t_ns"].max()
    assert traffic.duration_s == (truth["t_ns"].max() - truth["t_ns"].min()) / 1e9
    assert conversations["rtt_mean_ns_ab"].isna().all()


@pytest.mark.parametrize("what", traffic_module.AMOUNTS)
def test_bins_hold_what_came_in_them(traffic, truth, what):
    for flows, chosen in ((None, truth), ([number_of(traffic, 2)], truth[truth["destination"] == C4])):
        place = (chosen["t_ns"] - traffic.start_ns) // MS
        wanted = np.bincount(place, chosen[what], traffic.bins)
        assert np.array_equal(traffic.binned(flows, what), wanted)
    assert traffic.start_ns % MS == 0
    assert traffic.bins == len(wanted)
    assert traffic.binned([], what).sum() == 0


@pytest.mark.parametrize("together", [1, 50, 10**6])
@pytest.mark.parametrize("bin_s", [None, 0.005, 0.007, 1.0])
def test_rates_by_flow_hosts_and_in_all(traffic, truth, monkeypatch, together, bin_s):
    monkeypatch.setattr(traffic_module, "_TOGETHER", together)
    monkeypatch.setattr(traffic_module, "_CHUNK", 100)
    width_ns = MS if bin_s is None else round(bin_s * 1e9)
    by_keys = {"flow": ["source", "source_port", "destination", "destination_port"], "hosts": ["source", "destination"]}
    for by, keys in (*by_keys.items(), ("total", [])):
        found = traffic.rates(by, "payload", bin_s)
        wanted = truth.assign(t_ns=truth["t_ns"] // width_ns * width_ns).groupby(["t_ns", *keys])["payload"].sum()
        wanted = wanted[wanted > 0] * 8e9 / width_ns
        assert found["t_ns"].is_monotonic_increasing
        found = found.set_index(["t_ns", *keys])["rate_bps"].sort_index()
        pd.testing.assert_series_equal(found, wanted, check_names=False, check_dtype=False)
    in_packets = traffic.rates("total", "packets", bin_s)
    assert in_packets["rate_pps"].sum() * width_ns / 1e9 == pytest.approx(len(truth))


def test_the_injection_rate_is_a_moving_average_of_the_bins(traffic):
    plain = traffic.binned() * 8e9 / MS
    assert np.array_equal(traffic.injection_rate(), plain)
    for window in (2, 5, 18, 10_000):
        wanted = [
            plain[max(0, at - window // 2) : max(0, at - window // 2 + window)].mean() for at in range(len(plain))
        ]
        # sums of differences of a running sum: exact to the rounding of the sum
        assert traffic.injection_rate(window=window) == pytest.approx(wanted, rel=1e-9)
    one = [number_of(traffic, 0)]
    assert traffic.injection_rate(one, what="bytes").sum() == pytest.approx(traffic.binned(one, "bytes").sum() * 8000)


def test_the_matrix_is_square_and_directional(traffic, truth):
    matrix = traffic.matrix()
    assert list(matrix.index) == list(matrix.columns) == sorted([A4, B4, C4, A6, B6])
    wanted = truth.groupby(["source", "destination"])["payload"].sum()
    for (source, destination), amount in wanted.items():
        assert matrix.loc[source, destination] == amount
    assert matrix.to_numpy().sum() == truth["payload"].sum()
    assert list(traffic.host_pairs("packets").values()) == sorted(traffic.host_pairs("packets").values(), reverse=True)


def test_outbound_with_payload_is_what_the_thesis_counts(traffic, truth):
    chosen = traffic.select(f"src host {A4}")
    mine = truth[(truth["source"] == A4) & (truth["payload"] > 0)]
    assert chosen.binned(what="data_bytes").sum() == mine["bytes"].sum()
    assert chosen.binned(what="data_packets").sum() == len(mine)
    back = chosen.conversations()
    assert back[["packets_ba", "payload_ba", "bytes_ba"]].to_numpy().sum() == 0
    assert chosen.rates("hosts", "data_bytes")["source"].unique().tolist() == [A4]


def test_wrong_questions_are_answered_in_a_sentence(traffic, monkeypatch):
    for ask, says in (
        (lambda: traffic.binned(what="bits"), "'bits' is not counted: did you mean 'bytes'"),
        (lambda: traffic.binned([10**6]), "there is no flow 1000000: the flows are 0 to 7"),
        (lambda: traffic.rates("host"), "rates by 'host' are not known: did you mean 'hosts'"),
        (
            lambda: traffic.rates(bin_s=0.0001),
            "cannot be made of bins of 1 ms: read the captures with bins of 100 µs",
        ),
        (lambda: traffic.rates(bin_s=0.0015), "bins of 1.5 ms cannot be made"),
        (lambda: traffic.injection_rate(window=0), "moving average over 0 bins"),
        (lambda: traffic.injection_rate(what="packets"), "'packets' is not counted"),
        (lambda: traffic.matrix("bits"), "'bits' is not counted"),
    ):
        with pytest.raises(UsageError, match=says):
            ask()
    monkeypatch.setattr(traffic_module, "_MAX_BINS", 10)
    monkeypatch.setattr(traffic_module, "_MAX_HOSTS", 4)
    with pytest.raises(UsageError, match="choose wider ones"):
        traffic.binned()
    with pytest.raises(UsageError, match="5 hosts"):
        traffic.matrix()


def test_tcp_columns_that_are_not_known_are_na(tmp_path):
    path = tmp_path / "usual.pcap"
    path.write_bytes(classic(frames(usual())))
    table = read_captures(path).conversations()
    assert set(table["protocol"]) == {"tcp", "udp", "icmp", "icmp6"}
    tcp = table[table["protocol"] == "tcp"]
    assert tcp["handshake_ns"].notna().all()
    assert tcp["rtt_min_ns_ab"].notna().any()
    rest = table[table["protocol"] != "tcp"]
    assert rest[["handshake_ns", "rtt_mean_ns_ab", "rtt_min_ns_ba"]].isna().all().all()


def test_roce_is_told_apart_and_has_queue_pairs(tmp_path):
    path = tmp_path / "roce.pcap"
    talk = Talk(A4, B4, (1, 2)).open().packets
    path.write_bytes(classic(frames(sorted([*talk, *spaced([roce(A4, B4, 4, 17, psn, 1024) for psn in range(5)])]))))
    traffic = read_captures(path)
    pairs = traffic.queue_pairs()
    assert pairs[["source", "destination", "queue_pair", "packets", "payload"]].to_numpy().tolist() == [
        [A4, B4, 17, 5, 5120]
    ]
    assert traffic.select("roce").binned().sum() == 5120
    assert traffic.select("udp port 4791").binned(what="packets").sum() == 5
    assert set(traffic.conversations()["protocol"]) == {"tcp", "roce"}


def test_rates_over_time_without_packets_are_refused(traffic):
    with pytest.raises(UsageError, match=r"bins of 2 h 00 min are longer than the captures \(59\.8 ms\)"):
        traffic.rates(bin_s="2h")
