"""Slices of captures and of runs: against tshark, dpkt and Scapy, and what is said where there is nothing to cut."""

import gzip
import json
import subprocess
from pathlib import Path

import dpkt
import numpy as np
import pytest
from scapy.utils import RawPcapNgReader

import ringtap
from ringtap.analysis.pcap import scan
from ringtap.analysis.pcap.kernels import scan_state as ks
from ringtap.analysis.pcap.single_packets import CapturePoint, read_packets
from ringtap.cli import main
from ringtap.core.run_directory import RunDirectory, write_json
from tests.gold.analysis_sweep import write_sweep
from tests.gold.job_run import MS, START_NS, Node, Truth, write_ddp_job
from tests.unit.capture_makers import A4, B4, Blocks, Packet, classic, ethernet, udp

pytestmark = [pytest.mark.computes, pytest.mark.long, pytest.mark.together]

EXAMPLE = Path("examples/ring.pcap.gz")
ITERATIONS, EVERY_MS, OFFSET_NS = 20, 7, 5_000_000


def tshark(path, *fields, only=""):
    """Fields of the packets of a file, as tshark shows them."""
    command = ["tshark", "-n", "-r", str(path), "-T", "fields", "-E", "separator=|"]
    command += [word for name in fields for word in ("-e", name)] + (["-Y", only] if only else [])
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [tuple(line.split("|")) for line in done.stdout.splitlines()]


def sums(rows):
    return len(rows), sum(int(row[0]) for row in rows), sum(int(row[1]) for row in rows)


def run_packets(*words):
    return main(["packets", *map(str, words)])


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A job of two nodes whose clocks are 5 ms apart; each captures a packet every 7 ms from iteration 3 on."""
    path = tmp_path_factory.mktemp("slices") / "job"
    write_ddp_job(path, Truth(iterations=ITERATIONS, offsets_ns=(0, OFFSET_NS)))
    for number, (name, offset_ns) in enumerate((("n0", 0), ("n1", OFFSET_NS))):
        folder = path / "nodes" / name / "packets"
        folder.mkdir()
        begin_ns = START_NS + (50 + 3 * 200) * MS + number + offset_ns
        times_ns = range(begin_ns, begin_ns + 8 * 200 * MS, EVERY_MS * MS)
        made = [ethernet(udp(A4, B4, (7, 5001), 100 + place % 300)) for place in range(len(times_ns))]
        packets = [Packet(t_ns, data[:96], len(data)) for t_ns, data in zip(times_ns, made, strict=True)]
        half = len(packets) // 2
        (folder / "eth0-0.pcap").write_bytes(classic(packets[:half], nano=True, snap=96))
        (folder / "eth0-1.pcap").write_bytes(classic(packets[half:], nano=True, snap=96))
        facts = {"interface": "eth0", "files": ["eth0-0.pcap", "eth0-1.pcap"], "dropped_by_kernel": 3 * number}
        write_json(folder / "packets.json", facts)
    return path


@pytest.mark.parametrize("words", [None, "tcp port 18627", "src host 10.77.0.2 and not udp"])
def test_a_slice_of_a_capture_is_what_tshark_and_tcpdump_find_in_it(tmp_path, capsys, words):
    path, part = tmp_path / "slice.pcapng", ["--filter", words] if words else []
    assert run_packets(EXAMPLE, "--from", "+10s", "--to", "+11s", *part, "-o", path, "--json") == 0
    told = json.loads(capsys.readouterr().out)
    whole = tmp_path / "whole.pcap"
    whole.write_bytes(gzip.decompress(EXAMPLE.read_bytes()))
    if words:
        kept = tmp_path / "kept.pcap"
        subprocess.run(["tcpdump", "-r", whole, "-w", kept, words], check=True, capture_output=True)
        whole = kept
    first_s = float(tshark(EXAMPLE, "frame.time_epoch")[0][0])
    within = f"frame.time_epoch >= {first_s + 10:.9f} && frame.time_epoch < {first_s + 11:.9f}"
    expected = sums(tshark(whole, "frame.len", "frame.cap_len", only=within))
    assert (told["packets"], told["wire_bytes"], told["captured_bytes"]) == expected
    assert sums(tshark(path, "frame.len", "frame.cap_len")) == expected
    assert expected[0] > 100


def test_a_slice_of_an_iteration_is_what_tshark_counts_between_its_borders(run, tmp_path):
    job, path = ringtap.open_job(run), tmp_path / "slice.pcapng"
    row = job.iterations.iloc[6]
    assert run_packets(run, "--iteration", 6, "-o", path) == 0
    expected = np.zeros(3, np.int64)
    for name, offset_ns in (("n0", 0), ("n1", OFFSET_NS)):
        begin_s, end_s = ((int(row[end]) + offset_ns) / 1e9 for end in ("start_ns", "end_ns"))
        within = f"frame.time_epoch >= {begin_s:.9f} && frame.time_epoch < {end_s:.9f}"
        for part in (0, 1):
            capture = run / "nodes" / name / "packets" / f"eth0-{part}.pcap"
            expected += sums(tshark(capture, "frame.len", "frame.cap_len", only=within))
    assert sums(tshark(path, "frame.len", "frame.cap_len")) == tuple(expected)
    assert expected[0] == pytest.approx(2 * 200 / EVERY_MS, abs=2)
    times = [row[0] for row in tshark(path, "frame.time_epoch")]
    assert times == sorted(times)


def test_wireshark_shows_iteration_rank_and_clock(run, tmp_path):
    path = tmp_path / "slice.pcapng"
    assert run_packets(run, "--iteration", 6, "-o", path) == 0
    rows = tshark(path, "frame.interface_name", "frame.interface_description", "frame.comment")
    said = [(place, *row) for place, row in enumerate(rows) if row[2]]
    assert {row[1:] for row in said} == {
        ("eth0", f"node n{rank}", f"iteration 6, {end} packet here: node n{rank}, rank {rank}")
        for rank in (0, 1)
        for end in ("first", "last")
    }
    assert sorted(row[0] for row in said) == [0, 1, len(rows) - 2, len(rows) - 1]
    about = subprocess.run(["capinfos", path], capture_output=True, text=True, check=True).stdout
    assert (
        f"job, iteration 6; times by the clock of node n0, error at most 10 µs; ringtap {ringtap.__version__}" in about
    )


def test_all_packets_of_a_run_name_every_iteration(run, tmp_path, capsys):
    path = tmp_path / "all.pcapng"
    assert run_packets(run, "-o", path, "--json") == 0
    told = json.loads(capsys.readouterr().out)
    rows = tshark(path, "frame.comment")
    assert len(rows) == told["packets"] == 2 * -(-8 * 200 // EVERY_MS)
    named = {int(text.split()[1].rstrip(",")) for (comment,) in rows for text in comment.split("; ") if text}
    assert named == set(range(3, 11))
    assert [one["node"] for one in told["interfaces"]] == ["n0", "n1"]
    assert told["clock_error_ns"] == 10_000
    assert told["warnings"] == ["the capture of n1 on eth0 lost 3 packets in all"]


def test_dpkt_and_scapy_read_it_back_and_get_the_same_from_python(run, tmp_path):
    packets = ringtap.open_job(run).packets(iteration=6)
    path = packets.to_pcapng(tmp_path / "slice.pcapng")
    with path.open("rb") as file:
        by_dpkt = [(t_s, bytes(data)) for t_s, data in dpkt.pcapng.Reader(file)]
    with RawPcapNgReader(str(path)) as reader:
        by_scapy = [(about.tshigh << 32 | about.tslow, about.wirelen, data) for data, about in reader]
    assert [data for _, data in by_dpkt] == [packet.data for packet in packets]
    assert by_scapy == [(packet.t_ns, packet.wire_bytes, packet.data) for packet in packets]
    assert [bytes(packet)[:60] for _, packet in packets.to_dpkt()] == [packet.data[:60] for packet in packets]
    assert [bytes(packet)[:60] for packet in packets.to_scapy()] == [packet.data[:60] for packet in packets]
    frame = packets.to_frame()
    assert frame["node"].value_counts().to_dict() == {"n0": 29, "n1": 29}
    assert set(frame.attrs["columns"]) == set(frame.columns)
    assert frame["bytes"].sum() == sum(packet.wire_bytes for packet in packets)
    again = read_packets([CapturePoint(path)])
    assert [(one.t_ns, one.wire_bytes, one.data) for one in again] == [
        (one.t_ns, one.wire_bytes, one.data) for one in packets
    ]


def test_a_filter_chooses_within_an_iteration(run):
    job = ringtap.open_job(run)
    assert len(job.packets(6, "udp and dst port 5001")) == len(job.packets(6))
    with pytest.raises(ringtap.UsageError, match="no packet of iteration 6 matches 'tcp'"):
        job.packets(6, "tcp")


@pytest.mark.parametrize("is_recording", [False, True])
def test_what_may_be_missing_is_said(tmp_path, capsys, is_recording):
    """Of n0, all but one capture cannot be read, and that one began and ended within the iteration; n1 has nothing."""
    write_ddp_job(tmp_path / "job", Truth(iterations=4))
    begin_ns = START_NS + 250 * MS
    for name in ("n0", "n1"):
        (tmp_path / "job" / "nodes" / name / "packets").mkdir()
    folder = tmp_path / "job" / "nodes" / "n0" / "packets"
    data = classic([Packet(begin_ns + 20 * MS, bytes(60), 60), Packet(begin_ns + 50 * MS, bytes(60), 60)], nano=True)
    (folder / "eth0-0.pcap").write_bytes(data[:-4])
    (folder / "eth0-1.pcap").write_bytes(b"")
    (folder.parents[1] / "n1" / "packets" / "eth1-0.pcap").write_bytes(b"nonsense and more of it")
    facts = {
        "interface": "eth0",
        "files": ["eth0-0.pcap"],
        "begin_ns": begin_ns + 10 * MS,
        "end_ns": begin_ns + 60 * MS,
    }
    if is_recording:  # an agent that keeps packets around slow iterations lists their files at the end
        del facts["files"]
    write_json(folder / "packets.json", facts)
    assert run_packets(tmp_path / "job", "--iteration", 1, "-o", tmp_path / "out.pcapng", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["packets"] == 1
    assert [line.replace(f"{tmp_path}/job/nodes/", "") for line in told["warnings"]] == [
        "n0/packets/eth0-1.pcap is empty: it is left out",
        "n1/packets/eth1-0.pcap is not a capture: it is too short: it is left out",
        "n0/packets/eth0-0.pcap: 72 bytes at the end belong to a packet that is not whole: the capture was cut off",
        "the capture of n0 on eth0 began 10 ms after the beginning of this time",
        "the capture of n0 on eth0 ended 140 ms before the end of this time",
        "n1 captured no packet of iteration 1",
    ]


def test_times_are_right_where_the_clock_was_set(tmp_path):
    """The node's clock was set back by 1 s in iteration 9: what it showed twice is in the iteration that it was."""
    run = RunDirectory.create(tmp_path / "job", "job", [], 1)
    node, at_ns, back_ns = Node(run, "n0"), START_NS + 1000 * MS, 1000 * MS
    times = [START_NS + 100 * MS * number for number in range(21)]
    shown = [t_ns - back_ns * (t_ns >= at_ns) for t_ns in times]
    steps = []
    for number, (t_ns, real_ns) in enumerate(zip(shown, times, strict=True)):
        mono_ns = real_ns - START_NS
        steps.append((number, 0, t_ns - MS, t_ns, mono_ns - MS, mono_ns, 0, 1))
    node.steps(0, steps)
    mono_ns = at_ns - START_NS
    step = {"mono_before_ns": mono_ns - MS, "mono_ns": mono_ns, "t_ns": at_ns - back_ns, "step_ns": -back_ns}
    (node.path / "clock").mkdir()
    write_json(node.path / "clock" / "clock.json", {"reference": "n0", "measurements": [], "steps": [step]})
    (node.path / "packets").mkdir()
    packets = [Packet(t_ns + 10 * MS, bytes([number]) * 60, 60) for number, t_ns in enumerate(shown)]
    (node.path / "packets" / "eth0-0.pcap").write_bytes(classic(packets, nano=True))
    node.finish()
    job = ringtap.open_job(tmp_path / "job")
    assert len(job.iterations) == 20
    for number in range(20):
        assert [packet.data[0] for packet in job.packets(number)] == [number]


def test_several_interfaces_stay_apart(tmp_path):
    made = Blocks().interface(name="eth0", resolution=9).interface(link=101, name="tun0", resolution=6)
    data = ethernet(udp(A4, B4, (7, 7), 50))
    for number in range(6):
        made.packet(Packet(START_NS + number * MS, data[14 * (number % 2) :], len(data)), number % 2)
    section = Blocks(">").interface(name="eth1").packet(Packet(START_NS + 10 * MS, data, len(data)))
    path = tmp_path / "two.pcapng"
    path.write_bytes(made.bytes() + section.bytes())
    assert run_packets(path, "--filter", f"host {A4}", "-o", tmp_path / "out.pcapng") == 0
    names = [row[0] for row in tshark(tmp_path / "out.pcapng", "frame.interface_name")]
    assert names == ["eth0", "tun0"] * 3 + ["eth1"]
    assert [one.linktype for one in read_packets([CapturePoint(tmp_path / "out.pcapng")])] == [1, 101] * 3 + [1]


def test_more_packets_than_the_buffers_hold_go_through_files(tmp_path, monkeypatch):
    whole = read_packets([CapturePoint(EXAMPLE)], None)
    some = ringtap.read_captures(EXAMPLE, "tcp", cache=False)
    monkeypatch.setattr(scan, "_PICKS_IN_MEMORY", 64)
    monkeypatch.setattr(scan, "_BODY_WORDS_IN_MEMORY", ks.MAX_BLOCK_BYTES // 4 + 500)
    spilled = read_packets([CapturePoint(EXAMPLE)])
    assert isinstance(spilled.scans[0].bodies, np.memmap)
    assert isinstance(spilled.scans[0].picks, np.memmap)
    assert list(spilled) == list(whole)
    row = some.scanned.conversations[some.rows[0]]
    found = some.packets(int(some.rows[0]), int(row["first_ns"]), 3600)
    assert len(found) == row["packets"].sum()
    assert [packet.data for packet in found] == [whole[packet.number - 1].data for packet in found]
    monkeypatch.setattr(scan, "MAX_PICKED_BYTES", 100_000)
    with pytest.raises(ringtap.UsageError, match=r"ring\.pcap\.gz holds more than 2 GiB of these packets"):
        read_packets([CapturePoint(EXAMPLE)])


@pytest.fixture(scope="module")
def sweep(tmp_path_factory, run):
    """A sweep of one series whose step 1 has the packets of the job's iterations 4 and 5, and step 2 a reason."""
    path = tmp_path_factory.mktemp("slices") / "sweep"
    write_sweep(path, [("vgg16", "consistent")], loads_gbps=(0.0, 6.0, 10.0))
    lines = [json.loads(line) for line in (path / "points.jsonl").read_text().splitlines()]
    begin_ns = START_NS + (50 + 4 * 200) * MS
    for step, line in enumerate(lines):
        line["step"] = step
    lines[1] |= {"packets_start_ns": begin_ns, "packets_end_ns": begin_ns + 400 * MS}
    lines[2] |= {"packets_why": "S1: the disk is full"}
    job = path / lines[1]["directory"]
    (job / "nodes").rename(job / "nodes-of-sweep")
    (job / "nodes").symlink_to(run.absolute() / "nodes")
    (path / "points.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def test_packets_of_a_point_are_those_between_its_times(sweep, run, tmp_path, capsys):
    path = tmp_path / "point.pcapng"
    assert run_packets(sweep, "--point", "vgg16-consistent:1", "-o", path) == 0
    job = ringtap.open_job(run)
    both = len(job.packets(4)) + len(job.packets(5))
    assert f"{both} packets of point vgg16-consistent:1: " in capsys.readouterr().out
    packets = ringtap.open_sweep(sweep).packets("vgg16-consistent", step=1)
    assert len(packets) == len(tshark(path, "frame.len")) == both
    assert {text.split(",")[0] for text in packets.comments.values()} == {"iteration 4", "iteration 5"}


WRONG = {
    ("RUN", "--iteration", "1"): "no packet of iteration 1 was captured: the captures hold iterations 3 to 10",
    ("RUN", "--iteration", "99"): "has no iteration 99: the iterations are 0 to 19",
    ("RUN", "--iteration", "-1"): "has no iteration -1",
    ("RUN", "--point", "vgg16-burst:1"): "is a job, and --point is for sweeps",
    ("RUN", "--from", "+1s"): "--from and --to are for captures",
    ("RUN", "--filter", "tcp prot 5"): "is not understood from 'prot'",
    ("RUN", "RUN"): "is a run directory: name it alone",
    ("BARE",): "has no packets: n0: not asked for; n1: not asked for; record them with 'ringtap run --collect",
    ("SWEEP",): "is a sweep: name one point (--point SERIES:STEP), for example vgg16-consistent:1",
    ("SWEEP", "--point", "vgg16-consistent"): "'vgg16-consistent' is not SERIES:STEP, for example vgg16-consistent:0",
    ("SWEEP", "--point", "vgg16-constant:1"): "has no series 'vgg16-constant': did you mean 'vgg16-consistent'?",
    ("SWEEP", "--point", "vgg16-consistent:7"): "the steps of vgg16-consistent are 0, 1, 2",
    (
        "SWEEP",
        "--point",
        "vgg16-consistent:0",
    ): "no packets were recorded at point vgg16-consistent:0: the plan's",
    (
        "SWEEP",
        "--point",
        "vgg16-consistent:2",
    ): "no packets were recorded at point vgg16-consistent:2: S1: the disk is full",
    ("CAPTURE", "--iteration", "1"): "--iteration is for a run directory",
    ("CAPTURE", "--from", "noon-ish"): "'noon-ish' is not a time",
    ("CAPTURE", "--from", "+1 second"): "time after + '1 second' is not understood",
    ("CAPTURE", "--to", "+5s", "--from", "+6s"): "--from +6s is not before --to +5s",
    (
        "CAPTURE",
        "--from",
        "2030-01-01",
    ): "no packet is in this time: the captures hold packets from 2026-11-21",
    ("CAPTURE", "--filter", "host 10.9.9.9"): "no packet matches 'host 10.9.9.9'",
    ("CAPTURE", "--filter", "tcp[13] & 2 != 0"): "needs single packets",
    ("-", "--from", "+1s"): "'-' can be read once",
    ("nowhere.pcap",): "nowhere.pcap does not exist",
}


@pytest.mark.parametrize(("words", "says"), WRONG.items(), ids=map(" ".join, WRONG))
def test_bad_input_is_answered_in_one_sentence(run, sweep, tmp_path, capsys, words, says):
    if "BARE" in words:
        write_ddp_job(tmp_path / "bare", Truth(iterations=4))
    paths = {"RUN": run, "SWEEP": sweep, "CAPTURE": EXAMPLE, "BARE": tmp_path / "bare"}
    assert run_packets(*(paths.get(word, word) for word in words), "-o", tmp_path / "out.pcapng") == 2
    shown = capsys.readouterr()
    assert says in shown.err
    assert shown.err.count("\n") == 1
    assert shown.out == ""
    assert not (tmp_path / "out.pcapng").exists()


def test_an_existing_file_stays_and_a_capture_is_never_replaced(tmp_path, capsys):
    path = tmp_path / "out.pcapng"
    assert run_packets(EXAMPLE, "-o", path) == 0
    before = path.read_bytes()
    assert run_packets(EXAMPLE, "-o", path) == 2
    assert "is there already: choose another name, or give --force" in capsys.readouterr().err
    assert run_packets(EXAMPLE, "--filter", "tcp", "-o", path, "--force") == 0
    assert path.read_bytes() != before
    assert run_packets(path, "-o", path, "--force") == 2
    assert "is one of the captures that are read" in capsys.readouterr().err
    assert run_packets(EXAMPLE, "-o", tmp_path / "out.pcap") == 2
    assert "its name must end in .pcapng" in capsys.readouterr().err
    assert sorted(one.name for one in tmp_path.iterdir()) == ["out.pcapng"]


def test_flows_names_the_command_for_these_packets(tmp_path, capsys):
    assert main(["flows", str(EXAMPLE), "--filter", "host 10.77.0.1 and tcp"]) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.endswith("ringtap packets examples/ring.pcap.gz --filter 'host 10.77.0.1 and tcp' -o slice.pcapng")
