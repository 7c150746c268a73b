"""TCP sockets on datagrams recorded from a real kernel (6.18), beside what ss said of them at that moment."""

import contextlib
import re
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringtap.collectors import closing_sockets
from ringtap.collectors import inet_diag_layout as layout
from ringtap.collectors.collector_interface import Context
from ringtap.collectors.netlink import HEADER_BYTES, aligned, attributes, message_at
from ringtap.collectors.sockets import APART, OpenedConnections, SocketOwners, SocketsCollector, SocketTable
from ringtap.core.append_only_logs import RecordWriter, open_records, read_json_lines
from ringtap.core.tcp_info import INFO_BYTES
from tests.unit.agent_processes import wait_for

pytestmark = pytest.mark.shares

GOLD = Path(__file__).resolve().parents[2] / "gold"
DUMP = (GOLD / "sock_diag-6.18.bin").read_bytes()
GONE = (GOLD / "sock_diag-6.18-gone.bin").read_bytes()
LINES = (GOLD / "sock_diag-6.18.txt").read_text().splitlines()
CONNECTED = [line for line in LINES if line.startswith("ESTAB")]
MS = 1_000_000
INFO = 2


def rows_of(records: bytes, tmp_path: Path) -> list[dict[str, Any]]:
    path = tmp_path / "sockets.rec"
    path.unlink(missing_ok=True)
    writer = RecordWriter(path, layout.FIELDS, {})
    writer.append_packed(records)
    writer.close()
    file = open_records(path)
    assert file.torn_bytes == 0
    return [dict(zip([field.name for field in file.fields], row, strict=True)) for row in file.tail()]


def dump(table: SocketTable, data: bytes, mono_ns: int) -> bytes:
    table.begin(1_000_000 * MS + mono_ns, mono_ns)
    table.begin_dump()
    assert not table.take(memoryview(bytearray(data)), len(data))  # the end of the dump is in it
    table.end_dump()
    return table.records()


def messages(data: bytes) -> Iterator[tuple[int, int]]:
    position = 0
    while True:
        size, _, _ = message_at(memoryview(data), position, len(data))
        if not size:
            return
        yield position, size
        position += aligned(size)


def info_places(data: bytes) -> list[tuple[int, int]]:
    """Where the tcp_info of each connection starts, and its length."""
    view = memoryview(data)
    return [
        (start, length)
        for position, size in messages(data)
        for kind, start, length in attributes(view, position + HEADER_BYTES + 72, position + size)
        if kind == INFO
    ]


def with_info_of(data: bytes, length: int) -> bytes:
    """The same dump from a kernel whose tcp_info is longer or shorter."""
    out = b""
    view = memoryview(data)
    for position, size in messages(data):
        message = data[position : position + size]
        for kind, start, old in attributes(view, position + HEADER_BYTES + 72, position + size):
            if kind == INFO:
                info = data[start : start + old][:length].ljust(length, b"\xaa")
                before, after = data[position : start - 4], data[start + aligned(old) : position + size]
                message = before + struct.pack("=HH", length + 4, INFO) + info.ljust(aligned(length), b"\0") + after
                message = struct.pack("=I", len(message)) + message[4:]
        out += message.ljust(aligned(len(message)), b"\0")
    return out + data[len(data) - 20 :]


@pytest.fixture
def wanted() -> list[int]:
    return []


@pytest.fixture
def table(wanted: list[int]) -> SocketTable:
    return SocketTable(wanted.append, 3)


def test_every_connection_reads_as_ss_shows_it(table: SocketTable, wanted: list[int], tmp_path: Path) -> None:
    rows = rows_of(dump(table, DUMP, 5), tmp_path)
    assert len(rows) == len(CONNECTED) == 8  # and none of the TIME-WAITs
    by_inode = {row["inode"]: row for row in rows}
    assert sorted(wanted) == sorted(by_inode)
    for line in CONNECTED:
        row = by_inode[int(re.findall(r"ino:(\d+)", line)[0])]
        state, received, sent, local, peer = line.split()[:5]
        words = dict(word.partition(":")[::2] for word in line.split()[5:])
        assert (state, row["state"], row["tcp_state"]) == ("ESTAB", 1, 1)
        assert (int(received), int(sent)) == (row["rqueue"], row["wqueue"])
        for address, port, raw in ((local, row["sport"], row["source"]), (peer, row["dport"], row["destination"])):
            assert int(address.rpartition(":")[2]) == int.from_bytes(port, "big")
            loopback = bytes(15) + b"\1" if "[" in address else b"\x7f\0\0\1".ljust(16, b"\0")
            assert raw == loopback
        assert row["family"] == (10 if "[" in local else 2)
        assert int(words["sk"], 16) == row["cookie"]
        for name, column in (("mss", "snd_mss_bytes"), ("cwnd", "snd_cwnd"), ("segs_out", "segs_out")):
            assert int(words[name]) == row[column]
        for name in ("bytes_sent", "bytes_acked", "bytes_received"):
            assert int(words.get(name, 0)) == row[name]
        assert float(words["rtt"].partition("/")[0]) * 1000 == pytest.approx(row["rtt_us"])
        assert int(words["snd_wnd"]) == row["snd_wnd_bytes"]
        assert (row["t_ns"], row["mono_ns"]) == (1_000_000 * MS + 5, 5)


def test_ages_are_no_change_and_everything_else_is(table: SocketTable) -> None:
    dump(table, DUMP, 1)
    assert dump(table, DUMP, 2) == b""
    (first, length), *_ = info_places(DUMP)
    for place in range(length):
        changed = bytearray(DUMP)
        changed[first + place] ^= 0x40
        records = dump(table, bytes(changed), 3)
        unseen = 44 <= place < 60 or place >= INFO_BYTES
        assert len(records) == (0 if unseen else 300), place
        dump(table, DUMP, 4)


def test_a_connection_that_is_not_told_any_more_has_vanished(table: SocketTable, tmp_path: Path) -> None:
    first = rows_of(dump(table, DUMP, 1), tmp_path)
    places = list(messages(DUMP))
    position, size = next(one for one in places if DUMP[one[0] + HEADER_BYTES + 1] == 1)
    rows = rows_of(dump(table, DUMP[:position] + DUMP[position + size :], 2), tmp_path)
    assert [row["state"] for row in rows] == [0]
    was = next(row for row in first if row["cookie"] == rows[0]["cookie"])
    same = was.keys() - {"state", "t_ns", "mono_ns", "timer", "timer_retransmits"}
    assert {name: rows[0][name] for name in same} == {name: was[name] for name in same}
    assert len(table) == 7
    assert len(rows_of(dump(table, DUMP, 3), tmp_path)) == 1  # back again: told in full


def end_of(data: bytes, position: int, size: int, sent: int) -> bytes:
    """The kernel's message about the end of a connection of a dump; inode and queues are cleared by then."""
    message = bytearray(data[position : position + size])
    message[HEADER_BYTES + 1] = 7
    message[HEADER_BYTES + 56 : HEADER_BYTES + 72] = bytes(16)
    for kind, start, _ in attributes(memoryview(message), HEADER_BYTES + 72, size):
        if kind == INFO:
            struct.pack_into("=Q", message, start + 120, sent)
    return bytes(message)


@pytest.mark.parametrize("when", ["before it is missed", "after it is missed"])
def test_the_last_bytes_of_a_connection_are_those_that_the_kernel_tells_at_its_end(tmp_path: Path, when: str) -> None:
    table = SocketTable([].append, 3, awaits_ends=True)
    first = {row["cookie"]: row for row in rows_of(dump(table, DUMP, 1), tmp_path)}
    position, size = next(one for one in messages(DUMP) if DUMP[one[0] + HEADER_BYTES + 1] == 1)
    without = DUMP[:position] + DUMP[position + size :]
    records = dump(table, without, 2) if when == "after it is missed" else b""
    assert records == b""
    table.begin(1_000_003 * MS, 3)
    table.take_ends([end_of(DUMP, position, size, 123_456)])
    table.settle()
    last, gone = rows_of(table.records(), tmp_path)
    assert (last["state"], gone["state"]) == (7, 0)
    assert last["bytes_acked"] == gone["bytes_acked"] == 123_456
    assert last["inode"] == gone["inode"] == first[gone["cookie"]]["inode"]
    table.take_ends([end_of(DUMP, position, size, 123_456)])  # told twice, or not known
    assert table.records() == b""
    assert dump(table, without, 4) == b""
    assert (table.ends, len(table)) == (1, 7)


def test_the_end_of_a_connection_that_the_same_dump_has_met(tmp_path: Path) -> None:
    table = SocketTable([].append, 3, awaits_ends=True)
    table.begin(1_000_001 * MS, 1)
    table.begin_dump()
    table.take(memoryview(bytearray(DUMP)), len(DUMP))
    position, size = next(messages(DUMP))
    table.take_ends([end_of(DUMP, position, size, 5)])
    table.end_dump()
    assert sorted(row["state"] for row in rows_of(table.records(), tmp_path)) == [0, *[1] * 8, 7]
    assert len(table) == len(table._family) == len(table._request) == 7


def test_a_connection_whose_end_is_not_told_vanishes_with_the_next_sample(tmp_path: Path) -> None:
    table = SocketTable([].append, 3, awaits_ends=True)
    dump(table, DUMP, 1)
    position, size = next(messages(DUMP))
    assert dump(table, DUMP[:position] + DUMP[position + size :], 2) == b""
    table.begin(1_000_003 * MS, 3)
    table.settle()
    assert [row["state"] for row in rows_of(table.records(), tmp_path)] == [0]


@pytest.mark.parametrize("is_told", [True, False])
def test_bytes_between_the_last_sample_and_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_told: bool
) -> None:
    if not is_told:

        def refuse() -> None:
            raise PermissionError

        monkeypatch.setattr("ringtap.collectors.sockets.ClosingSockets", refuse)
    collector = SocketsCollector(Context(tmp_path, 0.01))
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
        accepted, _ = server.accept()
        port, other = client.getsockname()[1], server.getsockname()[1]
        ends = {struct.pack(">HH", port, other), struct.pack(">HH", other, port)}

        def is_over() -> bool:
            rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()]
            places = {f":{port:04X}", f":{other:04X}"}
            return all(row[3] == "06" for row in rows if {row[1][-5:], row[2][-5:]} == places)  # TIME-WAIT

        collector.start()
        client.sendall(bytes(50_000))
        client.close()
        while accepted.recv(1 << 16):
            pass
        accepted.close()
        wait_for(is_over)
        if collector._closing:  # whose thread may be late
            told = collector._closing._messages
            wait_for(lambda: ends <= {one[HEADER_BYTES + 4 : HEADER_BYTES + 8] for one in told.copy()})
        facts = collector.stop()
    file = open_records(tmp_path / "sockets" / "sockets.rec")
    names = [field.name for field in file.fields]
    rows = [dict(zip(names, row, strict=True)) for row in file.tail()]
    sent = [row["bytes_acked"] for row in rows if int.from_bytes(row["sport"], "big") == port and row["state"]]
    assert max(sent) == (50_002 if is_told else 1)  # with one for its opening, and one for its end
    assert facts["ends"] >= 2 * is_told


def test_connections_are_dumped_only_if_some_may_be_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a quiet connection, the bytes are read by name."""
    monkeypatch.setattr("ringtap.collectors.sockets._READ_ALL_EVERY_NS", 0)
    monkeypatch.setattr("ringtap.collectors.sockets._READ_ALL_COST", 0)
    collector = SocketsCollector(Context(tmp_path, 1e-6))
    dumps = []
    with contextlib.ExitStack() as opened:
        server = opened.enter_context(socket.create_server(("127.0.0.1", 0)))
        clients, accepted = [], []

        def connect() -> None:
            clients.append(opened.enter_context(socket.create_connection(server.getsockname())))
            accepted.append(opened.enter_context(server.accept()[0]))

        def sample() -> None:
            collector.sample()
            dumps.append(collector._facts["dumps"])

        connect()
        collector.start()
        sample()
        clients[0].sendall(bytes(1000))
        assert len(accepted[0].recv(1000, socket.MSG_WAITALL)) == 1000
        sample()
        connect()
        sample()
        monkeypatch.setattr(collector._opened, "read", lambda: None)
        sample()
        ports = [client.getsockname()[1] for client in clients]
        facts = collector.stop()
    # other programs of this machine may open connections meanwhile, each of which is a dump more
    assert dumps[0] <= dumps[1] < dumps[2] < dumps[3]
    assert facts["all_read"] == facts["samples"] == 6
    file = open_records(tmp_path / "sockets" / "sockets.rec")
    names = [field.name for field in file.fields]
    rows = [dict(zip(names, row, strict=True)) for row in file.tail()]
    sent = [[row["bytes_acked"] for row in rows if int.from_bytes(row["sport"], "big") == port] for port in ports]
    assert (max(sent[0]), sent[1][0]) == (1001, 1)


def test_without_a_file_of_counters_any_connection_may_be_new(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    counters = OpenedConnections()
    before = counters.read()
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()):
        after = counters.read()
    counters.close()
    assert before is not None
    assert after is not None
    assert (after[0] > before[0], after[1] > before[1]) == (True, True)
    monkeypatch.setattr("ringtap.collectors.sockets.PROC", tmp_path)
    assert OpenedConnections().read() is None


def test_ends_are_not_listened_to_where_too_many_connections_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(closing_sockets, "BUDGET", 10)
    monkeypatch.setattr(closing_sockets, "MEAN_RATE", 0.1)
    closing = closing_sockets.ClosingSockets()
    with socket.create_server(("127.0.0.1", 0)) as server:
        for _ in range(50):
            with socket.create_connection(server.getsockname()):
                server.accept()[0].close()
    deadline_s = time.monotonic() + 10
    while not closing.pauses and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert closing.pauses == 1
    assert closing._may_continue(closing._at_s + 1000)  # the budget recovers, up to its size
    assert closing._left == 9
    closing.close()
    assert closing.take()


def test_a_dump_that_breaks_off_lets_nothing_vanish(table: SocketTable) -> None:
    dump(table, DUMP, 1)
    half = next(position for position, _ in list(messages(DUMP))[5:])
    table.begin(2, 2)
    table.begin_dump()
    assert table.take(memoryview(DUMP[:half]), half)  # more is to come
    table.break_off_dump()
    assert table.records() == b""
    assert len(table) == 8
    assert dump(table, DUMP, 3) == b""


@pytest.mark.parametrize(
    ("length", "absent"),
    [
        (192, ["delivered", "delivered_ce", "bytes_sent", "bytes_retrans", "dsack_dups", "reord_seen"]),  # Linux 4.17
        (200, ["bytes_sent", "bytes_retrans", "dsack_dups", "reord_seen"]),  # 4.18
        (224, []),  # 4.19
        (232, []),  # 5.4
        (400, []),  # one to come
    ],
)
def test_kernels_with_other_lengths_of_tcp_info(length: int, absent: list[str], tmp_path: Path) -> None:
    late = ["rcv_ooopack", "snd_wnd_bytes"] if length < 232 else []
    assert layout.absent_fields(length) == absent + late
    expected = rows_of(dump(SocketTable(lambda _: None, 3), DUMP, 1), tmp_path)
    rows = rows_of(dump(SocketTable(lambda _: None, 3), with_info_of(DUMP, length), 1), tmp_path)
    assert rows == [row | dict.fromkeys(absent + late, 0) for row in expected]


def test_the_connections_that_carry_much_are_asked_for_by_name(table: SocketTable) -> None:
    dump(table, DUMP, 1 * MS)
    assert table.asked == []
    carried = bytearray(DUMP)
    places = [start for start, _ in info_places(DUMP)]
    for number, start in enumerate(places[:5]):  # five carry something, one of them too little
        (before,) = struct.unpack_from("<Q", carried, start + 120)
        struct.pack_into("<Q", carried, start + 120, before + (10_000 if number == 2 else 20_000 * (number + 1)))
    dump(table, bytes(carried), 300 * MS)
    ports = [int.from_bytes(identity[:2], "big") for identity in table.asked]
    told = [position for position, _ in messages(DUMP) if DUMP[position + HEADER_BYTES + 1] == 1]
    expected = [int.from_bytes(DUMP[told[n] + HEADER_BYTES + 4 : told[n] + HEADER_BYTES + 6], "big") for n in (4, 3, 1)]
    assert ports == expected  # the busiest three
    assert len(table.question) == 3 * 72
    dump(table, bytes(carried), 9_000 * MS)
    assert len(table.asked) == 3
    dump(table, bytes(carried), 10_301 * MS)
    assert table.asked == []


def test_a_busy_connection_that_waits_for_word_of_its_end_is_not_asked_for() -> None:
    table = SocketTable([].append, 3, awaits_ends=True)
    dump(table, DUMP, 1 * MS)
    carried = bytearray(DUMP)
    start, _ = info_places(DUMP)[0]
    (before,) = struct.unpack_from("<Q", carried, start + 120)
    struct.pack_into("<Q", carried, start + 120, before + 20_000)
    dump(table, bytes(carried), 300 * MS)
    assert len(table.asked) == 1
    position, size = next(one for one in messages(DUMP) if DUMP[one[0] + HEADER_BYTES + 1] == 1)
    dump(table, bytes(carried[:position] + carried[position + size :]), 600 * MS)
    assert table.asked == []


def test_answers_to_a_question(table: SocketTable, tmp_path: Path) -> None:
    """One as in the dump, one changed, one gone."""
    dump(table, DUMP, 1 * MS)
    carried = bytearray(DUMP)
    for start, _ in info_places(DUMP):
        struct.pack_into("<Q", carried, start + 120, 50_000)
    dump(table, bytes(carried), 300 * MS)
    told = {bytes(carried[p + 20 : p + 68]): bytes(carried[p : p + size]) for p, size in messages(bytes(carried))}
    buffer = bytearray(b"\xee" * (32 * APART))
    answers = [told[identity] for identity in table.asked]
    changed = bytearray(answers[1])
    struct.pack_into("<I", changed, 8, 77)  # the sequence number is not a part of the layout
    start = info_places(bytes(changed) + DUMP[-20:])[0][0]
    struct.pack_into("<Q", changed, start + 120, 60_000)
    for number, answer in enumerate((answers[0], bytes(changed), GONE)):
        buffer[number * APART : number * APART + len(answer)] = answer
    asked = list(table.asked)
    table.begin(310 * MS, 310 * MS)
    table.take_answers(memoryview(buffer), table.asked)
    rows = rows_of(table.records(), tmp_path)
    assert [(row["state"], row["bytes_acked"]) for row in rows] == [(1, 60_000), (0, 50_000)]
    assert asked[2] not in table.asked
    assert table.asked[:2] == asked[:2]
    assert len(table) == 7


def test_a_refusal_is_an_error_of_the_system(table: SocketTable) -> None:
    with pytest.raises(FileNotFoundError):  # ENOENT, in an answer to a dump
        table.take(memoryview(GONE), len(GONE))


@given(data=st.data())
def test_damaged_datagrams_raise_nothing_but_oserror(data: st.DataObject) -> None:
    damaged = bytearray(DUMP)
    for _ in range(data.draw(st.integers(0, 6))):
        damaged[data.draw(st.integers(0, len(DUMP) - 1))] = data.draw(st.integers(0, 255))
    length = data.draw(st.integers(0, len(DUMP)))
    table = SocketTable(lambda _: None, 3)
    dump(table, DUMP, 1)
    for _ in range(2):
        table.begin(2, 2)
        table.begin_dump()
        try:
            table.take(memoryview(damaged), length)
            table.end_dump()
        except OSError:
            table.break_off_dump()
        assert len(table.records()) % 300 == 0
        assert len(table.question) == 72 * len(table.asked)
    buffer = bytearray(3 * APART)
    buffer[: len(damaged)] = damaged[: len(buffer)]
    with contextlib.suppress(OSError):
        table.take_answers(memoryview(buffer), table.asked)
    assert len(table.records()) % 300 == 0


def test_owners_are_found_among_the_processes_that_can_be_read(tmp_path: Path) -> None:
    proc = tmp_path / "proc"
    for pid, rank in ((100, "1"), (200, "1")):  # a child has its parent's sockets open, too
        folder = proc / str(pid)
        (folder / "fd").mkdir(parents=True)
        (folder / "fd" / "3").symlink_to("socket:[777]")
        (folder / "fd" / "4").symlink_to("/dev/null")
        (folder / "environ").write_bytes(f"HOME=/\0RANK={rank}\0SLURM_PROCID=9\0".encode())
        (folder / "cmdline").write_bytes(b"python\0train.py\0")
    (proc / "300").mkdir()  # another user's

    class Owners(SocketOwners):
        pass

    Owners.proc = proc
    owners = Owners(tmp_path / "owners.jsonl", lambda: [300, 200, 100, 400])
    for inode in (0, 777, 888):
        owners.want(inode)
    owners.close()
    lines, _ = read_json_lines(tmp_path / "owners.jsonl")
    assert [{key: line[key] for key in line if key != "t_ns"} for line in lines] == [
        {"inode": 777, "pid": 100, "rank": 1, "command": "python train.py"}
    ]
    assert owners.failure == ""


def test_the_collector_works_without_a_connection_and_says_what_it_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ringtap.collectors.sockets._READ_ALL_EVERY_NS", 60_000 * MS)
    context = Context(tmp_path, 0.01)
    collector = SocketsCollector(replace(context))
    check = collector.check()
    assert (check.state, check.remedy) == ("ok", "")
    collector.start()
    collector.sample()
    facts = collector.stop()
    assert (facts["samples"], facts["all_read"], facts["lost_answers"]) == (3, 2, 0)
    about = open_records(tmp_path / "sockets" / "sockets.rec").about
    assert about["collector"] == "sockets"
    assert about["absent"] == []


def test_samples_that_are_rare_are_of_all_connections(tmp_path: Path) -> None:
    collector = SocketsCollector(Context(tmp_path, 0.4))
    collector.start()
    for _ in range(2):
        time.sleep(0.4)
        collector.sample()
    facts = collector.stop()
    assert (facts["samples"], facts["all_read"]) == (4, 4)


@pytest.mark.parametrize("compatible", [layout.COMPATIBLE, 99])  # 99: what no kernel knows, and refuses
def test_one_request_for_both_families_or_one_for_each(
    compatible: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout, "COMPATIBLE", compatible)
    ports = set()
    with contextlib.ExitStack() as opened:
        for family, address in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
            server = opened.enter_context(socket.create_server((address, 0), family=family))
            client = opened.enter_context(socket.create_connection(server.getsockname()[:2]))
            ports.add((int(family), client.getsockname()[1]))
        collector = SocketsCollector(Context(tmp_path, 0.01))
        how = "IPv4 and IPv6 apart" if compatible == 99 else "one walk for IPv4 and IPv6"
        assert how in collector.check().reason
        collector.start()
        collector.stop()
    records = open_records(tmp_path / "sockets" / "sockets.rec")
    names = [field.name for field in records.fields]
    family, sport = names.index("family"), names.index("sport")
    assert ports <= {(row[family], int.from_bytes(row[sport], "big")) for row in records.tail()}


def test_without_file_descriptors_the_check_says_so(tmp_path: Path) -> None:
    """What a sandbox without netlink sockets does, too: an error of the system, told in a sentence."""
    program = (
        "import resource\n"
        "from pathlib import Path\n"
        "from ringtap.collectors.collector_interface import Context\n"
        "from ringtap.collectors.qdisc import QdiscCollector\n"
        "from ringtap.collectors.sockets import SocketsCollector\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))\n"
        "for kind in SocketsCollector, QdiscCollector:\n"
        "    check = kind(Context(Path('.'), 1)).check()\n"
        "    print(check.state, '|', check.reason, '|', bool(check.remedy))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    lines = [line.split(" | ") for line in done.stdout.splitlines()]
    assert [(state, remedy) for state, _, remedy in lines] == [("unavailable", "True")] * 2
    assert all("Too many open files" in reason for _, reason, _ in lines)
