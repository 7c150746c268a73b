"""Traffic of the last minutes: which growth counts, since when, and whose it is."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ringtap.analysis.live.flows import Owners
from ringtap.analysis.live.recent_traffic import FlowEnds, RecentTraffic
from ringtap.core.append_only_logs import Field, RecordFile, RecordWriter, open_records
from tests.gold.job_run import TIMES, address_bytes

pytestmark = pytest.mark.computes
MS = 10**6
NAMES = ("bytes_acked", "bytes_received", "total_retrans", "dsack_dups")
NODE_OF = {"10.0.0.1": "n0", "10.0.0.2": "n1", "10.0.1.1": "n0"}


def log(path: Path, names: Sequence[str] = NAMES) -> RecordFile:
    fields = [
        *TIMES,
        Field("family", "<u1", "", "index"),
        Field("state", "<u1", "", "gauge"),
        *(Field(name, "V2", "", "index") for name in ("sport", "dport")),
        *(Field(name, "V16", "", "index") for name in ("source", "destination")),
        Field("cookie", "<u8", "", "index"),
        Field("inode", "<u4", "", "index"),
        *(Field(name, "<u8", "", "counter", 64) for name in names),
    ]
    about = {"every_s": 0.02, "dump_every_s": 0.3, "asked_by_name_s": 1.0}
    RecordWriter(path, fields, about).close()
    return open_records(path)


def record(at_ms: int, cookie: int, *counts: int, ends: tuple[str, str] = ("10.0.0.1", "10.0.0.2"), **more: int) -> Any:
    ports = [more.get(name, 40_000).to_bytes(2, "big") for name in ("sport", "dport")]
    addresses = [address_bytes(end) for end in ends]
    values = [*counts, *[0] * (len(NAMES) - len(counts))]
    return (at_ms * MS, at_ms * MS, 2, more.get("state", 1), *ports, *addresses, cookie, 100 + cookie, *values)


class Watched:
    """Traffic of node n0 whose rank 0 owns the sockets with these cookies."""

    def __init__(self, path: Path, *owned: int) -> None:
        self.file, self.owners = log(path), Owners()
        self.traffic = RecentTraffic(self.owners, lambda t_ns, _: t_ns)
        self.own(*owned)

    def own(self, *cookies: int) -> None:
        for cookie in cookies:
            self.owners.add_owner({"inode": 100 + cookie, "pid": 1, "rank": 0, "command": "python train.py"})

    def look(self, now_ms: int, *records: Any, is_begun: bool = False) -> None:
        if records:
            self.traffic.feed(self.file, records, is_begun)
        self.traffic.commit((now_ms * MS, now_ms * MS), NODE_OF, "n0")

    def grown(self) -> list[tuple[float, float, bool, int]]:
        return [
            (one.begin_ns / MS, one.end_ns / MS, one.ends.is_training, one.payload_bytes)
            for one in self.traffic.growths
        ]


@pytest.fixture
def watched(tmp_path: Path) -> Watched:
    return Watched(tmp_path / "sockets.rec", 1)


def test_growth_lies_between_two_samples_and_an_old_socket_counts_from_its_first_record(watched: Watched) -> None:
    watched.look(100, record(0, 1, 5_000), record(20, 1, 6_000), record(40, 1, 6_500))
    assert watched.grown() == [(0, 20, True, 1_000), (20, 40, True, 500)]
    assert watched.traffic.begin_ns == 0


def test_what_grew_after_a_pause_grew_in_the_last_period(watched: Watched) -> None:
    """A busy socket is in each sample as soon as it changes; one with little traffic so far only in every 15th."""
    watched.look(900, record(0, 1, 0), record(20, 1, 10), record(800, 1, 20))
    assert watched.grown()[1] == (780, 800, True, 10)
    watched.look(6_000, record(5_000, 1, 30))
    assert watched.grown()[2] == (4_700, 5_000, True, 10)


def test_a_new_socket_counts_from_its_first_byte_and_one_of_a_log_that_is_read_from_its_middle_does_not(
    tmp_path: Path,
) -> None:
    for name, is_begun, expected in (("a", False, [(700, 1_000, True, 9)]), ("b", True, [])):
        watched = Watched(tmp_path / name, 1, 2)
        watched.look(1_000, record(0, 1, 50), record(1_000, 2, 9), is_begun=is_begun)
        assert watched.grown() == expected


def test_a_socket_waits_for_its_owner(watched: Watched) -> None:
    watched.look(1_000, record(0, 1, 0), record(1_000, 2, 700))
    assert watched.grown() == []
    watched.own(2)
    watched.look(1_100)
    assert watched.grown() == [(700, 1_000, True, 700)]
    # another user's socket has none, and a generator's is known by its port
    watched.look(1_300, record(1_300, 3, 80), record(1_300, 4, 90, sport=5001))
    assert [one[2:] for one in watched.grown()[1:]] == [(False, 90)]
    watched.look(4_400)
    assert [one[2:] for one in watched.grown()[1:]] == [(False, 90), (False, 80)]


def test_what_stays_on_the_node_is_no_traffic_of_the_network(watched: Watched) -> None:
    for cookie, ends in enumerate((("127.0.0.1", "127.0.0.1"), ("10.0.0.1", "10.0.1.1"), ("10.0.0.1", "10.0.0.1")), 5):
        watched.own(cookie)
        watched.look(100, record(0, cookie, 0, ends=ends), record(20, cookie, 10, ends=ends))
    assert watched.grown() == []


def test_what_comes_from_a_node_that_is_not_recorded_counts_where_it_arrives(watched: Watched) -> None:
    ends = ("10.0.0.1", "192.0.2.7")
    watched.look(100, record(0, 1, 0, 0), record(20, 1, 10, 70), record(20, 1, 10, 70, ends=ends))
    watched.own(2)
    watched.look(200, record(120, 2, 0, 0, ends=ends), record(140, 2, 10, 70, ends=ends))
    assert [(one.ends, one.payload_bytes) for one in watched.traffic.growths] == [
        (FlowEnds("10.0.0.1", "10.0.0.2", True), 10),
        (FlowEnds("10.0.0.1", "192.0.2.7", True), 10),
        (FlowEnds("192.0.2.7", "10.0.0.1", True), 70),
    ]


def test_segments_are_lost_unless_they_arrived_twice(watched: Watched) -> None:
    rows = [(0, 4, 0), (20, 7, 0), (40, 9, 0), (60, 9, 2), (80, 10, 2)]
    watched.look(100, *(record(at_ms, 1, 0, 0, again, twice) for at_ms, again, twice in rows))
    # of nine sent again at 40 ms, two had arrived: 4, 7, 7, 7 and 8 were lost so far
    assert watched.traffic.losses(NODE_OF, "n0") == [
        (FlowEnds("10.0.0.1", "10.0.0.2", True), [(20 * MS, 3), (80 * MS, 1)])
    ]
    assert watched.traffic.tells_losses
    watched.traffic.feed(log(Path(watched.file.path).with_name("old.rec"), NAMES[:3]), [record(90, 1)[:-1]], False)
    assert not watched.traffic.tells_losses


def test_sockets_that_end_keep_what_they_lost(watched: Watched) -> None:
    watched.look(100, record(0, 1, 0, 0, 0), record(20, 1, 0, 0, 1), record(40, 1, state=0))
    assert [steps for _, steps in watched.traffic.losses(NODE_OF, "n0")] == [[(20 * MS, 1)]]


def test_memory_is_bounded_and_the_beginning_moves(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ringtap.analysis.live.recent_traffic._MAX_GROWTHS", 10)
    watched.traffic = RecentTraffic(watched.owners, lambda t_ns, _: t_ns)
    watched.look(1_000, *(record(20 * number, 1, number) for number in range(21)))
    assert len(watched.traffic.growths) == 10
    assert watched.traffic.begin_ns == 200 * MS
