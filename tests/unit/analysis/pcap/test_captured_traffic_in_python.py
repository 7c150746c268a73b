"""Filters, filled rates and single packets of captures, as a user of the library meets them."""

import gzip
import struct
from pathlib import Path

import dpkt
import numpy as np
import pandas as pd
import pytest
from scapy import utils as scapy_utils

import ringtap
from ringtap.analysis.pcap.single_packets import CapturePoint, read_packets

pytestmark = [pytest.mark.computes, pytest.mark.together]

EXAMPLE = Path("examples/ring.pcap.gz")


@pytest.fixture(scope="module")
def traffic() -> ringtap.Traffic:
    return ringtap.read_captures(EXAMPLE, "tcp")


def test_a_filter_while_reading_selects_the_same(traffic):
    assert traffic.conversations().equals(ringtap.read_captures(str(EXAMPLE)).select("tcp").conversations())


def test_conversations_flows_and_rates_join_by_their_keys(traffic):
    flows = traffic.flows().merge(traffic.conversations()[["conversation", "a"]], on="conversation")
    assert (flows["flow"] // 2 == flows["conversation"]).all()
    assert ((flows["source"] == flows["a"]) == (flows["flow"] % 2 == 0)).all()
    for table in (traffic.conversations(), traffic.flows(), traffic.rates("flow"), traffic.rates("conversation")):
        assert set(table.attrs["columns"]) == set(table.columns)
        assert table.attrs["units"].get("t_ns", "ns since 1970-01-01 UTC") == "ns since 1970-01-01 UTC"


@pytest.mark.parametrize("by", ["conversation", "flow", "hosts", "total"])
def test_filled_rates_have_every_bin_and_the_same_sum(traffic, by):
    sparse, filled = (traffic.rates(by, bin_s="100ms", fill=fill) for fill in (False, True))
    bins = filled["t_ns"].unique()
    assert (np.diff(bins) == 100_000_000).all()
    groups = len(filled) // len(bins)
    assert len(filled) == groups * len(bins)
    assert filled["rate_bps"].sum() == pytest.approx(sparse["rate_bps"].sum())
    assert filled["rate_bps"].notna().all()
    keys = [name for name in sparse if name != "rate_bps"]
    both = filled.merge(sparse, on=keys, suffixes=("", "_sparse"))
    assert len(both) == len(sparse)
    assert (both["rate_bps"] == both["rate_bps_sparse"]).all()


def test_rates_of_a_conversation_are_those_of_its_two_flows(traffic):
    by_flow, by_conversation = (traffic.rates(by, bin_s=0.1, fill=True) for by in ("flow", "conversation"))
    sums = by_flow.assign(conversation=by_flow["flow"] // 2).groupby(["t_ns", "conversation"])["rate_bps"].sum()
    found = by_conversation.set_index(["t_ns", "conversation"])["rate_bps"]
    assert found.sort_index().to_numpy() == pytest.approx(sums.sort_index().to_numpy())


def test_packets_of_a_conversation_are_all_of_it(traffic):
    table = traffic.conversations()
    for row in table.nlargest(3, "payload_ab").itertuples():
        middle = (row.first_ns + row.last_ns) // 2
        packets = traffic.packets(row.conversation, middle, within=3600)
        frame = packets.to_frame()
        assert len(packets) == len(frame) == row.packets_ab + row.packets_ba
        assert frame["bytes"].sum() == row.bytes_ab + row.bytes_ba
        assert frame["payload"].sum() == row.payload_ab + row.payload_ba
        assert frame["t_ns"].min() == row.first_ns
        assert frame["t_ns"].max() == row.last_ns
        assert set(frame[frame["source"] == row.a]["source_port"]) == {row.a_port}
        assert set(frame.attrs["columns"]) == set(frame.columns)


def test_packets_around_a_time_are_those_within_it(traffic):
    row = traffic.conversations().nlargest(1, "payload_ab").iloc[0]
    whole = traffic.packets(row["conversation"], row["first_ns"], 3600).to_frame()
    at_ns = int(whole["t_ns"].iloc[len(whole) // 2])
    for around in (at_ns, pd.Timestamp(at_ns, tz="UTC")):
        some = traffic.packets(row["conversation"], around, "20ms").to_frame()
        expected = whole[(whole["t_ns"] - at_ns).abs() <= 20_000_000].reset_index(drop=True)
        assert some.equals(expected)
        assert 0 < len(some) < len(whole)


def test_packets_are_those_that_dpkt_and_scapy_read(traffic):
    row = traffic.conversations().iloc[0]
    packets = traffic.packets(int(row["conversation"]), int(row["first_ns"]), 3600)
    with gzip.open(EXAMPLE) as file:
        frames = list(dpkt.pcap.UniversalReader(file))
    for raw, (t_s, packet), layers in zip(packets, packets.to_dpkt(), packets.to_scapy(), strict=True):
        expected_s, data = frames[raw.number - 1]
        assert float(expected_s) == pytest.approx(t_s, abs=1e-6)
        assert bytes(packet) == raw.data == data
        assert bytes(layers)[: len(data)] == data
        assert layers["TCP"].dport == packet.data.data.dport
        assert layers.wirelen == raw.wire_bytes


def block(kind: int, body: bytes, order: str) -> bytes:
    body += bytes(-len(body) % 4)
    return struct.pack(f"{order}II", kind, 12 + len(body)) + body + struct.pack(f"{order}I", 12 + len(body))


@pytest.mark.parametrize("order", ["<", ">"])
def test_pcapng_of_two_interfaces_has_the_times_and_frames_that_scapy_reads(order, tmp_path):
    parts = [block(0x0A0D0D0A, struct.pack(f"{order}IHHq", 0x1A2B3C4D, 1, 0, -1), order)]
    for link, resolution in ((1, 6), (101, 9)):
        option = struct.pack(f"{order}HHB3xHH", 9, 1, resolution, 0, 0)
        parts.append(block(1, struct.pack(f"{order}HHI", link, 0, 0) + option, order))
    truth = []
    for number in range(20):
        which, data = number % 2, bytes(range(number, number + 40 + number))
        t_ns = 1_700_000_000_000_000_000 + number * 1_234_000
        ticks = t_ns // 1000 if which == 0 else t_ns
        head = struct.pack(f"{order}IIIII", which, ticks >> 32, ticks & 0xFFFFFFFF, len(data), len(data) + 5)
        parts.append(block(6, head + data, order))
        truth.append((t_ns, (1, 101)[which], len(data) + 5, data))
    path = tmp_path / "two.pcapng"
    path.write_bytes(b"".join(parts))
    found = list(read_packets([CapturePoint(path)]))
    assert [(one.t_ns, one.linktype, one.wire_bytes, one.data) for one in found] == truth
    with scapy_utils.RawPcapNgReader(str(path)) as reader:
        read = list(reader)
    assert [data for data, _ in read] == [data for *_, data in truth]
    path.write_bytes(b"".join(parts)[:-3])
    assert len(read_packets([CapturePoint(path)])) == len(truth) - 1


def test_a_lead_of_a_capture_moves_its_packets(tmp_path):
    moved = ringtap.read_captures([EXAMPLE], offsets_ns=[5_000_000_000])
    row = moved.conversations().iloc[0]
    frame = moved.packets(0, int(row["first_ns"]), "1ms").to_frame()
    assert frame["t_ns"].iloc[0] == row["first_ns"]


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda traffic: traffic.packets(10**6, 0), "there is no conversation 1000000: they are numbered 0 to"),
        (lambda traffic: traffic.packets("tcp", 0), "there is no conversation 'tcp'"),
        (lambda traffic: traffic.packets(0, 0), "has no packet within 10 ms of this time"),
        (lambda traffic: traffic.packets(0, "noon-ish"), "'noon-ish' is not a time"),
        (lambda traffic: traffic.packets(0, 0, "1 second"), "a time span '1 second' is not understood"),
        (lambda traffic: traffic.packets(0, 0, -1), "-1 s is not a positive time"),
        (lambda traffic: traffic.rates(bin_s=-1), "a width of bins of -1 s is not a positive time"),
        (lambda traffic: traffic.rates("conversations"), "did you mean 'conversation'"),
        (lambda traffic: traffic.rates(bin_s="1ms", what="packet"), "did you mean 'packets'"),
        (lambda traffic: traffic.select("tcp porrt 5"), "is not understood from 'porrt'"),
        (lambda _: ringtap.read_captures([]), "no capture was named"),
        (lambda _: ringtap.read_captures(""), "an empty text names no capture"),
        (lambda _: ringtap.read_captures("none.pcap"), r"none\.pcap does not exist"),
        (lambda _: ringtap.read_captures("none.pcap", "tcp prot 5"), "is not understood from 'prot'"),
        (lambda _: ringtap.read_captures(EXAMPLE, bin_s="1 ns"), "1 µs to 1 h"),
    ],
)
def test_wrong_calls_are_answered_in_a_sentence(traffic, call, says):
    with pytest.raises(ringtap.UsageError, match=says) as error:
        call(traffic)
    assert "\n" not in str(error.value)


def test_rates_of_too_many_bins_are_not_filled(traffic, monkeypatch):
    monkeypatch.setattr("ringtap.analysis.pcap.captured_traffic._MAX_FILLED", 1000)
    with pytest.raises(ringtap.UsageError, match="choose wider bins, select some of the traffic, or leave fill out"):
        traffic.rates("conversation", fill=True)


def test_a_capture_that_is_cut_off_gives_a_warning_and_the_rest(tmp_path):
    path = tmp_path / "cut.pcap"
    path.write_bytes(gzip.decompress(EXAMPLE.read_bytes())[:-7])
    with pytest.warns(ringtap.RingtapWarning, match="belong to a packet that is not whole"):
        traffic = ringtap.read_captures(path, cache=False)
    assert len(traffic.conversations())
