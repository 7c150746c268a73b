"""``ringtap flows`` as people and programs use it."""

import csv
import fcntl
import gzip
import json
import os
import pty
import shlex
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import pandas as pd
import pytest

from ringtap.analysis.pcap import byte_sources
from ringtap.analysis.pcap.scan_captures import read_captures
from ringtap.cli import main
from ringtap.core.errors import UsageError
from tests.unit.agent_processes import ended, wait_for
from tests.unit.capture_makers import (
    A4,
    B4,
    C4,
    START_NS,
    Blocks,
    Packet,
    Talk,
    arp,
    bare,
    classic,
    frames,
    spaced,
    udp,
    usual,
)

pytestmark = [pytest.mark.computes, pytest.mark.long, pytest.mark.together]

LOOPBACK = Path(__file__).parents[3] / "gold" / "loopback.pcap"
FIRST = (
    *("conversation", "protocol", "a", "a_port", "b", "b_port", "packets_ab", "bytes_ab", "packets_ba", "bytes_ba"),
    *("payload_ab", "payload_ba", "first_ns", "last_ns"),
)


@pytest.fixture
def capture(tmp_path):
    path = tmp_path / "usual.pcap"
    path.write_bytes(classic(frames(usual())))
    return path


def fails(capsys, *arguments):
    """The one sentence of a refusal."""
    assert main(["flows", *map(str, arguments)]) == 2
    found = capsys.readouterr()
    assert found.out == ""
    assert found.err.startswith("ringtap: ")
    assert found.err.count("\n") == 1
    return found.err


def fails_after_text(capsys, *arguments):
    assert main(["flows", *map(str, arguments)]) == 2
    return capsys.readouterr().err


def as_json(capsys, *arguments):
    assert main(["flows", "--json", *map(str, arguments)]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_text_says_what_was_read_and_what_comes_next(capsys):
    assert main(["flows", str(LOOPBACK)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == (
        "2 conversations: the one between 127.0.0.1:41184 and 127.0.0.1:5001 (tcp) moves most, 200 kB or 100% of all "
        "payload."
    )
    assert lines[2] == f"{LOOPBACK}: from 2026-11-21 02:55:30.948 UTC, 656 µs"
    assert lines[3] == "24 packets, 202.6 kB on the wire, 2.471 Gbit/s; conversations: 2 of tcp"
    assert lines[5].split()[2:8] == ["packets", "payload", "back", "start", "duration", "rate"]
    assert lines[6].split()[:7] == ["tcp", "127.0.0.1:41184", "127.0.0.1:5001", "16", "200", "kB", "0"]
    assert lines[-1] == f"Next: ringtap flows {shlex.quote(str(LOOPBACK))} --rates rates.csv"


def test_json_holds_what_the_table_holds(capture, capsys):
    data = as_json(capsys, capture, "--matrix")
    assert data["files"] == [str(capture)]
    assert data["bin_s"] == 0.001
    assert data["counts"]["packets"] == len(usual())
    assert tuple(data["conversations"][0])[: len(FIRST)] == FIRST
    traffic = read_captures(capture)
    table = traffic.conversations()
    assert [row["bytes_ab"] for row in data["conversations"]] == table["bytes_ab"].tolist()
    rtt = [row["rtt_min_ns_ab"] for row in data["conversations"]]
    assert [value is None for value in rtt] == table["rtt_min_ns_ab"].isna().tolist()
    assert {(row["source"], row["destination"]): row["payload"] for row in data["matrix"]} == traffic.host_pairs()
    assert data["start_ns"] == traffic.start_ns


def test_filters_count_in_text_and_json(capture, capsys):
    words = f"src host {A4} and udp"
    data = as_json(capsys, capture, "--filter", words)
    assert data["filter"] == words
    assert [row["packets_ab"] for row in data["conversations"]] == [5]
    assert [row["packets_ba"] for row in data["conversations"]] == [0]
    assert data["counts"]["packets"] == len(usual())
    assert main(["flows", str(capture), "--filter", words]) == 0
    assert f"of these '{words}': 5 packets" in capsys.readouterr().out
    outbound = as_json(capsys, capture, "--outbound", A4, "--filter", "udp")
    assert outbound["conversations"] == data["conversations"]


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_tables_are_written_whole_and_nothing_is_overwritten(capture, tmp_path, capsys, suffix):
    table, rates = tmp_path / f"table{suffix}", tmp_path / f"rates{suffix}"
    arguments = ["flows", str(capture), "-o", str(table), "--rates", str(rates), "--by", "hosts", "--of", "payload"]
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert f"Wrote {table}\nWrote {rates}: payload by hosts, bins of 1 ms" in text
    assert f"Next: ringtap structure {capture}" in text
    reader = pd.read_csv if suffix == ".csv" else pd.read_parquet
    traffic = read_captures(capture)
    found = reader(table)
    wanted = traffic.conversations().reset_index(drop=True)
    assert found["a"].tolist() == wanted["a"].tolist()
    assert found["rtt_mean_ns_ab"].isna().tolist() == wanted["rtt_mean_ns_ab"].isna().tolist()
    pd.testing.assert_frame_equal(reader(rates), traffic.rates("hosts", "payload"), check_dtype=False)
    before = table.read_bytes()
    assert "there already" in fails(capsys, *arguments[1:])
    assert main([*arguments, "--force", "--filter", "tcp"]) == 0
    assert table.read_bytes() != before
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted({table.name, rates.name, capture.name})


def test_json_stays_alone_when_tables_are_written(capture, tmp_path, capsys):
    rates = tmp_path / "rates.csv"
    assert main(["flows", str(capture), "--json", "--rates", str(rates), "--by", "total", "--bin", "10ms"]) == 0
    found = capsys.readouterr()
    assert json.loads(found.out)["counts"]["packets"] == len(usual())
    assert found.err == f"Wrote {rates}: bytes, bins of 10 ms\n"
    with rates.open() as file:
        rows = list(csv.DictReader(file))
    sent = sum(float(row["rate_bps"]) for row in rows) * 0.01 / 8
    conversations = read_captures(capture).conversations()
    assert sent == pytest.approx(conversations[["bytes_ab", "bytes_ba"]].to_numpy().sum())


def test_fine_bins_are_read_with(capture, tmp_path, capsys):
    rates = tmp_path / "rates.csv"
    assert main(["flows", str(capture), "--rates", str(rates), "--bin", "50us", "--outbound", A4]) == 0
    text = capsys.readouterr().out
    assert "data_bytes by flow, bins of 50 µs" in text
    table = pd.read_csv(rates)
    assert set(table["source"]) == {A4}
    assert (table["t_ns"] % 50_000 == 0).all()
    assert (table["t_ns"] % 1_000_000 != 0).any()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is empty"),
        (b"hello, this is not a capture at all", "is not a capture"),
        (b"\xd4\xc3\xb2\xa1", "is not a capture: it is too short"),
        (classic([]), "holds no packets"),
        (classic(frames(usual()))[:50], "holds no packets, only the beginning of one"),
        (
            classic([Packet(1, b"", 2**30)]),
            "holds no packets that can be read: the first record has an impossible length",
        ),
        (
            Blocks().interface().block(6, bytes(8)).bytes(),
            "holds no packets that can be read: the 1 there are contradict",
        ),
        (gzip.compress(b""), "nothing that can be unpacked"),
        (gzip.compress(b"hello, this is not a capture at all"), "is not a capture"),
    ],
)
def test_what_is_no_capture_is_said_in_a_sentence(tmp_path, capsys, content, says):
    path = tmp_path / "file.pcap"
    path.write_bytes(content)
    error = fails(capsys, path)
    assert says in error
    assert str(path) in error


def test_other_refusals_are_sentences_too(capture, tmp_path, capsys):
    for arguments, says in (
        ([tmp_path / "none.pcap"], "does not exist"),
        ([capture, capture], "is named twice"),
        (
            [capture, "--filter", "host 9.9.9.9"],
            "no packet matches 'host 9.9.9.9': the largest of 7 conversations: tcp",
        ),
        ([capture, "--filter", "len > 5"], "tcpdump -r FILE -w PART"),
        ([capture, "--bin", "1"], "number and a unit"),
        ([capture, "--bin", "0s"], "a width of bins of 0 s is not a positive time"),
        ([capture, "--bin", "1ns"], "1 µs to 1 h"),
        ([capture, "-o", tmp_path / "table.txt"], "must end in .parquet or .csv"),
        ([capture, "-o", tmp_path / "no" / "table.csv"], "is not a directory"),
        ([capture, "--by", "host"], "did you mean 'hosts'?"),
        ([], "required"),
    ):
        assert says in fails(capsys, *arguments)
    folder = tmp_path / "empty"
    folder.mkdir()
    assert "is a directory without captures" in fails(capsys, folder)


def test_a_file_that_may_not_be_read_is_said(capture, capsys, monkeypatch):
    def refused(path, **options):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(byte_sources.io, "FileIO", refused)  # root may read everything
    assert fails(capsys, capture) == f"ringtap: {capture} cannot be read: Permission denied\n"


def test_what_was_unusual_is_said_in_words(tmp_path, capsys):
    path = tmp_path / "odd.pcap"
    packets = frames([(0, udp(A4, B4, (1, 2), 10))] * 3) + frames([(5_000, arp())], bare)
    packets += [packets[0].cut(20)]
    path.write_bytes(gzip.compress(classic(packets) + bytes(7))[:-3])
    assert main(["flows", str(path)]) == 0
    text = capsys.readouterr().out
    for sentence in (
        "1 compressed file ends too early: what came until then is counted",
        "7 bytes at the end belong to a packet that is not whole",
        "1 packet lacks a header that the capture cut off",
        "1 packet is earlier than one before",
        "1 frame is no IP (ARP, LLDP, spanning tree, …): in the totals, and where a filter takes them",
    ):
        assert sentence in text
    assert as_json(capsys, path)["counts"]["unpacking_cut"] == 1


def text(capsys, path, *arguments):
    assert main(["flows", str(path), *map(str, arguments)]) == 0
    return capsys.readouterr().out.splitlines()


def test_conversations_are_shown_in_the_order_that_is_asked_for(tmp_path, capsys):
    path = tmp_path / "sorted.pcap"
    made = [(0, udp(A4, B4, (1, 2), 100)), (1_000, udp(A4, C4, (3, 4), 900)), (5_000_000, udp(A4, B4, (1, 2), 1))]
    made += [(2_000 + number, udp(B4, C4, (5, 6), 0)) for number in range(3)]
    path.write_bytes(classic(frames(sorted(made)), nano=True))
    orders = {
        "payload": ["900", "101", "0"],
        "packets": ["0", "101", "900"],
        "bytes": ["900", "101", "0"],
        "start": ["101", "900", "0"],
        "duration": ["101", "0", "900"],
        "resent": ["0", "101", "900"],
    }
    for order, payloads in orders.items():
        rows = [line.split() for line in text(capsys, path, "--sort", order) if line.startswith("udp ")]
        assert [row[4] for row in rows] == payloads, order
    assert text(capsys, path)[6].split()[3:] == ["1", "900", "B", "0", "B", "+1", "µs", "0", "s", "-", "-", "-"]


def test_the_answer_names_the_conversation_that_moved_most(tmp_path, capsys):
    path = tmp_path / "some.pcap"
    made = [(0, udp(A4, B4, (1, 2), 100)), (1_000, udp(A4, C4, (3, 4), 200)), (2_000, udp(C4, A4, (4, 3), 100))]
    path.write_bytes(classic(frames(made), nano=True))
    for order in ("payload", "start"):
        answer = text(capsys, path, "--sort", order)[0]
        assert answer.startswith("2 conversations: the one between ")
        assert f"{A4}:3" in answer
        assert f"{C4}:4" in answer
        assert answer.endswith(" (udp) moves most, 300 B or 75% of all payload.")
    assert text(capsys, path, "--filter", f"src host {C4}")[0].endswith(" moves most, 100 B or 100% of all payload.")
    path.write_bytes(classic(frames([(0, udp(A4, B4, (1, 2), 0))]), nano=True))
    assert text(capsys, path)[0] == "1 conversation, and none has payload."


def test_the_round_trip_of_the_text_is_that_of_the_whole_path(tmp_path, capsys):
    """Whoever captured: the handshake's, or both directions' together, and not one host's delay."""
    path = tmp_path / "path.pcap"
    talk = Talk(A4, B4, (40001, 5001)).open(rtt_ns=400_000).data(0, 1000, 1000).data(1, 500)
    path.write_bytes(classic(frames(talk.packets), nano=True))
    assert text(capsys, path)[6].endswith(" 400 µs")
    path.write_bytes(classic(frames(talk.packets[3:]), nano=True))
    assert text(capsys, path)[6].endswith(" 200 µs")
    path.write_bytes(classic(frames(talk.packets[3:5]), nano=True))
    assert text(capsys, path)[6].endswith(" -")


def test_no_rate_is_told_across_a_clock_that_was_set(tmp_path, capsys):
    path = tmp_path / "set.pcap"
    packets = frames([(1_000_000 * number, udp(A4, B4, (1, 2), 1000)) for number in range(3)])
    early = Packet(1_000, packets[0].data, packets[0].length)
    path.write_bytes(classic([early, *packets]))
    lines = text(capsys, path)
    assert lines[3] == "4 packets, 4.168 kB on the wire; conversations: 1 of udp"
    assert lines[6].split()[-3:] == ["-", "-", "-"]
    assert any("1 packet is more than a day after or before the one ahead" in line for line in lines)
    with pytest.raises(UsageError, match="its clock jumps by more than a day; read the packets of one side alone"):
        read_captures(path).binned()
    assert main(["structure", str(path)]) == 2
    assert "its clock jumps by more than a day" in capsys.readouterr().err
    rates = tmp_path / "rates.csv"
    text(capsys, path, "--rates", str(rates))
    assert pd.read_csv(rates)["t_ns"].tolist() == [
        0,
        *(START_NS // 1_000_000 * 1_000_000 + 1_000_000 * number for number in range(3)),
    ]


def test_a_capture_without_any_time_is_counted_and_has_no_rates(tmp_path, capsys):
    path = tmp_path / "simple.pcapng"
    blocks = Blocks().interface()
    for one in frames(usual()):
        blocks.simple_packet(one)
    path.write_bytes(blocks.bytes())
    lines = text(capsys, path)
    assert lines[2] == f"{path}: no packet has a time"
    assert lines[-1] == f"  {len(usual())} packets have no time: nothing is timed"
    assert main(["structure", str(path)]) == 2
    assert "no packet has a time, so there are no iterations to find" in capsys.readouterr().err
    data = as_json(capsys, path)
    assert (data["start_ns"], data["duration_s"]) == (None, None)
    assert {(row["first_ns"], row["last_ns"], row["handshake_ns"]) for row in data["conversations"]} == {(None,) * 3}
    assert sum(row["packets_ab"] + row["packets_ba"] for row in data["conversations"]) == len(usual())
    assert "no packet of the capture has a time" in fails_after_text(capsys, path, "--rates", tmp_path / "rates.csv")


def test_a_packet_without_a_time_before_all_others_counts_at_the_first_time(tmp_path, capsys):
    path = tmp_path / "first.pcapng"
    first, *others = frames(usual())
    blocks = Blocks().interface().simple_packet(first)
    for one in others:
        blocks.packet(one)
    path.write_bytes(blocks.bytes())
    note = "  1 packet has no time: counted at that of the packet before, or of the first that has one, and not timed"
    assert note in text(capsys, path)


def test_headers_that_were_cut_off_are_the_reason_why_there_are_no_conversations(tmp_path, capsys):
    path = tmp_path / "cut.pcap"
    path.write_bytes(classic([one.cut(30) for one in frames(usual())]))
    why = f"here are no conversations, because the headers of {len(usual())} packets were cut off: capture more of each"
    lines = text(capsys, path)
    assert f"T{why}." in lines
    assert not any("round trip" in line for line in lines)
    assert f"no packet matches 'ip': t{why}" in fails(capsys, path, "--filter", "ip")


@pytest.mark.parametrize(("after_s", "is_proposed"), [(1, True), (100_000, False)])
def test_a_structure_that_would_be_refused_is_not_proposed(tmp_path, capsys, after_s, is_proposed):
    path = tmp_path / "jump.pcap"
    made = [(0, udp(A4, B4, (1, 2), 100)), (after_s * 1_000_000_000, udp(A4, B4, (1, 2), 100))]
    path.write_bytes(classic(frames(made)))
    lines = text(capsys, path, "--rates", tmp_path / "rates.csv")
    assert (lines[-1] == f"Next: ringtap structure {path}") is is_proposed
    assert main(["structure", str(path)]) == (1 if is_proposed else 2)


def test_a_small_matrix_is_shown(tmp_path, capsys):
    path = tmp_path / "three.pcap"
    made = [udp(A4, B4, (1, 2), 1000), udp(B4, C4, (1, 2), 500), udp(C4, A4, (1, 2), 250)]
    path.write_bytes(classic(frames(spaced(made))))
    assert main(["flows", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    head = next(number for number, line in enumerate(lines) if line.startswith("payload from"))
    assert lines[head].split()[-3:] == [A4, B4, C4]
    assert lines[head + 1].split() == [A4, "-", "1", "kB", "-"]
    assert lines[head + 3].split() == [C4, "250", "B", "-", "-"]


def run(*arguments, **options):
    command = [sys.executable, "-m", "ringtap.cli", "flows", *map(str, arguments)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)


def test_the_default_path_loads_no_heavy_library():
    code = (
        "import sys; from ringtap.cli import main\n"
        "for more in ([], ['--json'], ['--matrix']): main(['flows', sys.argv[1], *more])\n"
        "print([n for n in ('pandas', 'numba', 'scipy', 'pyarrow', 'matplotlib', 'rich') if n in sys.modules], "
        "file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, LOOPBACK], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stderr.splitlines()[-1] == "[]"


def test_an_interrupt_leaves_nothing(tmp_path):
    """While it waits for a pipe that says nothing more."""
    with ended(run("-", "-o", tmp_path / "table.csv", cwd=tmp_path)) as running:
        running.stdin.write(classic(frames(usual())))
        running.stdin.flush()
        wait_for(lambda: not any(fcntl.ioctl(running.stdin, termios.FIONREAD, bytes(4))), 200)  # bytes in the pipe
        time.sleep(0.5)
        running.send_signal(signal.SIGINT)
        out, err = running.communicate(timeout=30)
    assert running.returncode == 130
    assert (out, err) == (b"", b"ringtap: interrupted\n")
    assert list(tmp_path.iterdir()) == []


def test_progress_is_for_terminals(tmp_path):
    """A pipe that comes in two pieces, more than half a second apart."""
    parent, child = pty.openpty()
    command = [sys.executable, "-m", "ringtap.cli", "flows", "-"]
    environment = dict(os.environ) | {"TERM": "xterm", "COLUMNS": "100"}
    data = classic(frames(usual()))
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=child, env=environment
    ) as running:
        running.stdin.write(data[:700])
        running.stdin.flush()
        shown = b""
        while b"bytes" not in shown and b"kB" not in shown:
            shown += os.read(parent, 4096)
        running.stdin.write(data[700:])
        running.stdin.close()
        assert running.wait(timeout=60) == 0
    os.close(child)
    os.close(parent)
