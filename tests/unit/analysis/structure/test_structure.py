"""The structure of a real capture: a ring of three hosts on the testbed under cross traffic, beside its step log."""

import dataclasses
import gzip
import json
import struct
from pathlib import Path

import numpy as np
import pytest

from ringtap import cli
from ringtap.analysis.model.bytes_per_iteration import demand
from ringtap.analysis.pcap import read_captures
from ringtap.analysis.structure.capture_streams import read_structure
from ringtap.analysis.structure.payload_time_series import Vantage, streams_of
from ringtap.analysis.structure.structure import Structure, find_structure
from ringtap.core.errors import MeasurementError, UsageError
from tests.unit.structure_makers import Job, make, together

pytestmark = [pytest.mark.computes, pytest.mark.long, pytest.mark.together]

ROOT = Path(__file__).resolve().parents[4]
RING = ROOT / "examples" / "ring.pcap.gz"
S0, S1, S2 = "10.77.0.1", "10.77.0.2", "10.77.0.3"
CROSS_FROM, CROSS_TO = "10.78.0.4", "10.78.0.1"
PARAMETERS = 30_000
# ends of the 30 optimizer steps by the step log of the same job, and begins of communication by DDP's, in us after the
# first end
EPOCH_NS = 1_795_269_506_611_406_840
STEP_ENDS_US = [
    0, 87119, 156155, 222496, 288543, 356494, 426505, 499334, 565254, 650629, 718445, 799873, 893340, 959204, 1029556,
    1106595, 1177538, 1248899, 1322467, 1391272, 1468914, 1534305, 1605341, 1680167, 1747794, 1811226, 1884654,
    1952636, 2022658, 2090392,
]  # fmt: skip
COMMUNICATION_US = [
    -24130, 44879, 123840, 192234, 257473, 324385, 390376, 459651, 532864, 602146, 673135, 753993, 834891, 928729,
    994839, 1065317, 1143219, 1214489, 1286446, 1359935, 1426872, 1496246, 1570020, 1639592, 1715934, 1783349, 1846628,
    1920704, 1986523, 2057144,
]  # fmt: skip


@pytest.fixture(scope="module")
def found() -> Structure:
    return read_structure(RING, hosts={"S0": [S0, CROSS_TO]})


def test_iterations_are_those_of_the_step_log(found: Structure) -> None:
    assert found.period.verdict == "sure"
    assert len(found.boundaries_ns) == len(STEP_ENDS_US)
    log_s = (STEP_ENDS_US[-1] - STEP_ENDS_US[0]) / 1e6 / (len(STEP_ENDS_US) - 1)
    assert found.period.mean_s == pytest.approx(log_s, rel=0.02)
    assert found.period.low_s < log_s < found.period.high_s
    late_us = (found.boundaries_ns - EPOCH_NS) / 1e3 - np.array(COMMUNICATION_US)
    # a bin of 1 ms either way, and what lies between DDP's call and the first packet
    assert np.median(np.abs(late_us)) < 1500
    assert np.quantile(np.abs(late_us), 0.9) < 5000


def test_the_ring_its_order_and_its_volume(found: Structure) -> None:
    assert (found.shape.name, found.shape.hosts) == ("ring", (S1, "S0", S2))
    asked = demand(PARAMETERS, 3).worker_bytes
    # from above: gloo puts headers of 48 bytes before messages of some kB
    assert 1 < found.volume.worker_bytes / asked < 1.02
    assert found.volume.parameters_least is not None
    assert found.volume.parameters is not None
    assert found.volume.parameters_least < PARAMETERS < found.volume.parameters


def test_cross_traffic_is_told_apart_and_the_three_flows_are_named(found: Structure) -> None:
    pairs = {
        (stream.source, stream.destination): kind
        for stream, (kind, _) in zip(found.streams.streams, found.sorted.kinds, strict=True)
        if stream.total > 1e6
    }
    assert pairs == {
        (CROSS_FROM, "S0"): "cross",
        **dict.fromkeys([(S1, "S0"), ("S0", S2), (S2, S1)], "training"),
    }
    roles = {role.role: (role.source, role.destination) for role in found.roles}
    assert roles == {
        "training only": ("S0", S2),
        "training beside cross traffic": (S1, "S0"),
        "cross traffic": (CROSS_FROM, "S0"),
    }
    rates = found.flow_rates.set_index("role")
    # both training flows carry the same in the same time; in communication the rate is above that of the iteration
    assert rates["bytes_per_iteration"].iloc[0] == pytest.approx(rates["bytes_per_iteration"].iloc[1], rel=0.01)
    assert (rates["communication_bps"].iloc[:2] > 2 * rates["iteration_bps"].iloc[:2]).all()


def test_without_names_nothing_joins_the_two_addresses_of_a_host() -> None:
    plain = read_structure(RING)
    assert [role.role for role in plain.roles] == ["training only", "cross traffic"]
    assert "--host NAME=ADDRESS" in plain.roles_missing


@pytest.mark.parametrize(("host", "before", "after"), [(S0, S1, S2), (S1, S2, S0), (S2, S0, S1)])
def test_one_host_sees_its_neighbours_and_the_period(found: Structure, host: str, before: str, after: str) -> None:
    one = read_structure(RING, filter=f"host {host}")
    assert (one.shape.name, one.shape.hosts) == ("member of a ring", (before, host, after))
    assert not one.shape.whole
    assert one.period.mean_s == pytest.approx(found.period.mean_s, rel=0.01)
    assert one.volume.worker_bytes == pytest.approx(found.volume.worker_bytes, rel=1e-3)
    assert one.volume.parameters_most == pytest.approx(found.volume.parameters, abs=2)


def test_what_several_hosts_captured_counts_once(found: Structure) -> None:
    whole = read_captures(RING)
    places = [Vantage(host, whole.select(f"host {host}")) for host in (S0, S1, S2)]
    merged = find_structure(streams_of(places))
    assert merged.shape.hosts == (S0, S2, S1)
    assert merged.training.starts.tolist() == found.training.starts.tolist()
    assert merged.volume.worker_bytes == found.volume.worker_bytes
    pairs = {(member.stream.source, member.stream.destination): member.stream for member in merged.training.major}
    assert pairs[S0, S2].seen_by == {S0, S2}
    assert pairs[S0, S2].copies == 2


def test_two_hosts_that_exchange_are_a_pair_if_both_captured() -> None:
    made = make(Job({("10.0.0.1", "10.0.0.2"): 160_000, ("10.0.0.2", "10.0.0.1"): 160_000}))
    one = find_structure(together(*made.streams))
    assert one.shape.name == "one peer"
    both = find_structure(together(*(dataclasses.replace(stream, copies=2) for stream in made.streams)))
    assert (both.shape.name, both.shape.workers) == ("pair", 2)
    assert both.volume.worker_bytes == pytest.approx(160_192, rel=1e-3)


def test_parts_of_one_capture_are_added_up(found: Structure) -> None:
    """Files of one place, one after the other: each flow is in both, at different times."""
    whole = read_captures(RING)
    cells = whole.scanned.cells
    middle = int(np.median(cells["bin"]))
    parts = []
    for name, mine in (("first", cells["bin"] < middle), ("second", cells["bin"] >= middle)):
        traffic = read_captures(RING)
        object.__setattr__(traffic.scanned, "cells", cells[mine])
        parts.append(Vantage(name, traffic))
    merged = streams_of(parts)
    assert merged.total == pytest.approx(found.streams.total, rel=1e-3)
    assert find_structure(merged).training.starts.tolist() == found.training.starts.tolist()


def test_a_clock_that_is_ahead_and_drifts_is_put_right(found: Structure) -> None:
    whole = read_captures(RING)

    def to_reference(t_ns: np.ndarray) -> np.ndarray:
        return t_ns + 5_000_000_000 + (t_ns - EPOCH_NS) // 1000

    places = [Vantage(S0, whole.select(f"host {S0}")), Vantage(S1, whole.select(f"host {S1}"), to_reference)]
    merged = streams_of(places)
    by_pair = {(stream.source, stream.destination): stream for stream in merged.streams if stream.total > 1e6}
    other = {(stream.source, stream.destination): stream for stream in found.streams.streams if stream.total > 1e6}
    shift = by_pair[S2, S1].bins[0] * 1_000_000 + merged.start_ns
    truth = other[S2, S1].bins[0] * 1_000_000 + found.streams.start_ns
    assert abs(shift - to_reference(np.array([truth]))[0]) <= 1_000_000
    assert by_pair[S1, S0].seen_by == {S0, S1}


def test_one_direction_alone_is_training_all_the_same_and_said_so() -> None:
    one = read_structure(RING, filter=f"src host {S0}")
    assert one.training.one_way
    assert (one.shape.name, one.shape.workers) == ("one direction", None)
    assert f"{S0} sends to {S2}" in one.shape.unseen
    assert one.period.iterations >= 28


def test_finer_bins_give_the_same_iterations(found: Structure) -> None:
    fine = read_structure(RING, bin_s=0.0002, hosts={"S0": [S0, CROSS_TO]})
    assert len(fine.boundaries_ns) == len(found.boundaries_ns)
    assert np.abs(fine.boundaries_ns - found.boundaries_ns).max() < 3e6
    assert fine.period.mean_s == pytest.approx(found.period.mean_s, rel=0.005)


def test_cross_traffic_alone_is_said_to_be_no_training() -> None:
    with pytest.raises(MeasurementError, match=r"no training was found in .*ring\.pcap\.gz: .* of payload in"):
        read_structure(RING, filter=f"host {CROSS_FROM}")


def test_no_payload_and_no_files_are_said() -> None:
    with pytest.raises(UsageError, match="no capture was named"):
        read_structure([])
    with pytest.raises(UsageError, match="no packet matches"):
        read_structure(RING, filter="host 192.0.2.1")
    with pytest.raises(UsageError, match="name it alone"):
        read_structure([ROOT, RING])


def test_the_verb_says_first_what_was_found(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["structure", str(RING), "--host", f"S0={S0},{CROSS_TO}"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"From {RING}, in bins of 1ms." in lines
    assert lines[0].startswith(f"A training job: a ring of 3 hosts, {S1} > S0 > {S2} > {S1}, 29 whole iterations of 71")
    assert lines[0].endswith("this is sure.")
    assert lines[1].startswith("A worker sends 162.3 kB per iteration: with ring all-reduce")
    assert lines[1].endswith("29,823 to 30,432 parameters of 32 bit, if each host has one worker.")
    assert lines[-1].startswith("Next, for figures and tables: ringtap structure ")


def test_json_is_alone_on_stdout_and_whole(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["structure", str(RING), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["shape"]["hosts"] == [S0, S2, S1]
    assert data["period"]["verdict"] == "sure"
    assert len(data["boundaries_ns"]) == data["period"]["iterations"] + 1 == 30
    assert {row["traffic_class"] for row in data["streams"]} >= {"training", "cross"}
    assert data["steps"] is None
    assert sum(data["classes"].values()) == sum(row["payload_bytes"] for row in data["streams"])


def test_figures_tables_and_data_are_written_and_not_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    words = ["structure", str(RING), "--host", f"S0={S0},{CROSS_TO}", "-o", str(out)]
    assert cli.main(words) == 0
    wrote = [line.removeprefix("Wrote ") for line in capsys.readouterr().out.splitlines() if line.startswith("Wrote ")]
    names = ("flows", "rates", "period", "iterations", "matrix", "bursts")
    assert {Path(path).name for path in wrote} == {
        *(f"{name}.{kind}" for name in names for kind in ("png", "svg", "csv")),
        "streams.csv",
        "flow-rates.csv",
        "structure.json",
    }
    assert all(Path(path).stat().st_size > 0 for path in wrote)
    period = (out / "period.svg").read_text()
    for label in ("lag in ms", "autocorrelation", "time since communication began in ms", "training payload in "):
        assert f">{label}" in period
    data = json.loads((out / "structure.json").read_text())
    assert set(data["captions"]) == set(names)
    assert "moving average of 7 bins of 1 ms" in data["captions"]["flows"]
    assert cli.main(words) == 2
    assert "is not empty" in capsys.readouterr().err
    assert cli.main([*words, "--force", "--average", "50", "--json"]) == 0
    assert "moving average of 50 bins" in json.loads((out / "structure.json").read_text())["captions"]["flows"]
    assert json.loads(capsys.readouterr().out)["period"]["iterations"] == 29


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ([str(RING), "--filter", "host 10.78.0.4"], 1, "no training was found"),
        ([str(RING), "--host", "S0"], 2, "is not NAME=ADDRESS"),
        ([str(RING), "--bin", "2s"], 2, "outside of 10us to 1s"),
        ([str(RING), "--average", "0"], 2, "1 or more"),
        (["missing.pcap"], 2, "missing.pcap"),
        ([str(ROOT / "tests")], 2, "run directory"),
    ],
)
def test_what_goes_wrong_is_one_sentence(
    words: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["structure", *words]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert said in captured.err
    assert captured.err.startswith("ringtap: ")
    assert captured.err.count("\n") == 1


def test_a_run_s_clocks_names_losses_and_step_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run directory of two nodes: one's clock is 7 s ahead, a third node's capture is empty."""
    run = tmp_path / "run"
    whole = gzip.decompress(RING.read_bytes())
    for name, address in (("alpha", S0), ("beta", S1), ("gamma", S2)):
        packets = run / "nodes" / name / "packets"
        packets.mkdir(parents=True)
        ahead_s = 7 if name == "beta" else 0
        content = shifted(whole, address, ahead_s) if name != "gamma" else whole[:24]
        (packets / "eth0-0.pcap").write_bytes(content)
        (packets / "packets.json").write_text(json.dumps({"dropped_by_kernel": 5 if name == "alpha" else 0}))
        clock = run / "nodes" / name / "clock"
        clock.mkdir()
        fit = {"from_ns": 0, "t0_ns": 0, "offset_ns": ahead_s * 10**9, "drift_ppm": 0.0, "error_ns": 1000.0}
        (clock / "clock.json").write_text(json.dumps({"reference": "alpha", "fit": fit, "segments": [fit]}))
    (run / "run.json").write_text(json.dumps({"schema": 1, "kind": "job", "status": "complete"}))
    assert cli.main(["structure", str(run), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["places"] == ["alpha", "beta"]
    assert any("alpha lost 5 packets" in line for line in data["warnings"])
    assert any(line.startswith("gamma is left out:") for line in data["warnings"])
    assert data["steps"] is None
    # both ends of S1 > S0 were captured, on clocks 7 s apart: once, and at the time of the reference
    assert data["shape"]["hosts"] == [S0, S2, S1]
    late_us = (np.array(data["boundaries_ns"]) - EPOCH_NS) / 1e3 - np.array(COMMUNICATION_US)[
        : len(data["boundaries_ns"])
    ]
    assert np.median(np.abs(late_us)) < 1500


def shifted(capture: bytes, address: str, ahead_s: int) -> bytes:
    """The packets of one address, by a clock that is ahead (little-endian pcap of Ethernet and IPv4)."""
    wanted = bytes(map(int, address.split(".")))
    parts, at = [capture[:24]], 24
    while at < len(capture):
        seconds, fraction, kept, length = struct.unpack_from("<IIII", capture, at)
        frame = capture[at + 16 : at + 16 + kept]
        if wanted in (frame[26:30], frame[30:34]):
            parts += [struct.pack("<IIII", seconds + ahead_s, fraction, kept, length), frame]
        at += 16 + kept
    return b"".join(parts)


def test_captures_of_different_times_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = bytearray(gzip.decompress(RING.read_bytes()))
    first, later = tmp_path / "first.pcap", tmp_path / "later.pcap"
    first.write_bytes(data)
    at = 24
    while at < len(data):
        second, _, captured = struct.unpack_from("<III", data, at)
        struct.pack_into("<I", data, at, second + 60)
        at += 16 + captured
    later.write_bytes(data)
    assert cli.main(["structure", str(later), str(first), "--no-cache"]) == 2
    said = capsys.readouterr().err
    # the capture takes 18.2 s
    assert "later.pcap begins 41.8 s after " in said
    assert "first.pcap has ended, so they did not capture the same job: give captures of one time" in said
