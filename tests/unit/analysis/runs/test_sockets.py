import json

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringtap.analysis.job import flows
from ringtap.analysis.job.flows import sockets_of
from ringtap.analysis.job.run import open_job
from ringtap.analysis.runs import sockets
from ringtap.analysis.runs.node_batches import Batches
from ringtap.analysis.runs.node_records import NodeLogs
from ringtap.analysis.runs.samples_to_iterations import Borders
from ringtap.analysis.runs.sockets import socket_log
from ringtap.analysis.runs.traffic_classes import CLASSES
from ringtap.core.run_directory import RunDirectory, write_json
from tests.gold.job_run import MS, START_NS, Node, Socket, Truth, write_ddp_job

pytestmark = [pytest.mark.computes, pytest.mark.long, pytest.mark.together]


def new_node(tmp_path, name="n0"):
    path = tmp_path / "job"
    run = RunDirectory.open(path) if path.exists() else RunDirectory.create(path, "job", [], 1)
    return Node(run, name)


def grown(node, counter="bytes_acked"):
    """Rows of (socket, begin in ms, end in ms, growth)."""
    log = socket_log(NodeLogs(node.path))
    rows = []
    for part in log.growth():
        for end, begin_ns, end_ns, amount in zip(
            part.end, part.begin_ns, part.end_ns, part.amounts[counter], strict=True
        ):
            if amount:
                rows.append((int(end), (begin_ns - START_NS) / MS, (end_ns - START_NS) / MS, amount))
    return rows


def one(cookie=1, port=1000, remote=("10.0.0.2", 2000), **counters):
    return Socket(cookie, ("10.0.0.1", port), remote, counters)


def test_history_does_not_count_and_a_new_socket_does(tmp_path):
    node = new_node(tmp_path)
    old, new = one(bytes_acked=500), one(2, 1001, bytes_acked=70)
    records = [old.record(START_NS), new.record(START_NS + 30 * MS)]
    node.sockets(records, 0.01, {})
    assert grown(node) == [(1, 20.0, 30.0, 70.0)]


@pytest.mark.parametrize("chunk_records", [10**6, 2])
def test_a_sender_is_not_busy_for_a_peer_that_answers_no_more(tmp_path, monkeypatch, chunk_records):
    """A pause that ends counts; after the last byte nothing does, also if the log is read in parts."""
    monkeypatch.setattr(sockets, "CHUNK_RECORDS", chunk_records)
    node = new_node(tmp_path)
    socket = one()
    records = []
    for t_ms, sent, busy_ms in ((0, 0, 0), (10, 100, 8), (20, 100, 18), (30, 200, 25), (40, 200, 35), (990, 200, 985)):
        socket.counters |= {"bytes_acked": sent, "busy_time_us": 1000 * busy_ms}
        records.append(socket.record(START_NS + t_ms * MS))
    node.sockets(records, 0.01, {})
    borders = Borders(np.array([START_NS, START_NS + 1000 * MS]), np.zeros(1, np.int64))
    found = flows.socket_bytes_of(NodeLogs(node.path), borders, np.zeros(1, np.int64), np.full(1, -1))
    assert found.sums["bytes_acked"] == [200]
    assert found.sums["busy_time_us"] == [25_000]


def test_growth_belongs_to_the_last_period_of_a_pause(tmp_path):
    node = new_node(tmp_path)
    socket = one()
    records = []
    for t_ms, sent in ((0, 0), (10, 100), (500, 300), (510, 350)):
        socket.counters["bytes_acked"] = sent
        records.append(socket.record(START_NS + t_ms * MS))
    node.sockets(records, 0.01, {})
    assert grown(node) == [(0, 0.0, 10.0, 100.0), (0, 490.0, 500.0, 200.0), (0, 500.0, 510.0, 50.0)]


def test_a_late_sample_spreads_growth_over_the_real_gap(tmp_path):
    node = new_node(tmp_path)
    socket, other = one(), one(2, 1001)
    records = []
    for t_ms, sent in ((0, 0), (10, 100), (28, 300)):
        socket.counters["bytes_acked"] = other.counters["bytes_acked"] = sent
        # the two families are dumped apart: a sample's records may differ by some time
        records += [socket.record(START_NS + t_ms * MS), other.record(START_NS + t_ms * MS + 200_000)]
    node.sockets(records, 0.01, {})
    assert [row[1:3] for row in grown(node) if row[0] == 0] == [(0.2, 10.0), (10.2, 28.0)]


def test_connections_that_were_idle_all_the_time_grew_by_nothing(tmp_path):
    node = new_node(tmp_path)
    idle = [one(number, 1000 + number, bytes_acked=500) for number in (1, 2)]
    # one record of each, at the first sample, as the collector writes what never changes
    node.sockets([socket.record(START_NS) for socket in idle], 0.1, {}, dump_every_s=0.3, asked_by_name_s=1.0)
    assert grown(node) == []
    table = measure(tmp_path, ["n0"], [0, 100, 200]).flows
    assert table["payload_bytes"].tolist() == [0.0] * 4


def test_ranks_of_a_process_group_are_joined_by_pid(tmp_path):
    """torch.multiprocessing.spawn sets no RANK; a batch system's may be the launcher's for all of them."""
    node = new_node(tmp_path)
    sockets = [one(number, 1000 + number) for number in range(1, 6)]
    node.sockets([socket.record(START_NS) for socket in sockets], 0.1, {})
    steps = [(number, 0, START_NS + number * MS, START_NS + number * MS + 5, 0, 0, 0, 1) for number in range(3)]
    for rank, pid in ((0, 71), (1, 72)):
        node.steps(rank, steps, pid, 2)
    node.steps(0, steps, 90, 1)  # of no process group
    (node.path / "host").mkdir()
    # the launcher, its ranks, and a loader of the second; all have the batch system's rank
    parents = {70: 1, 71: 70, 72: 70, 73: 72, 90: 1}
    ranks = {70: 0, 71: 0, 72: 0, 73: 0}
    for folder, name, extra in (("host", "processes.jsonl", {}), ("sockets", "owners.jsonl", {"t_ns": START_NS})):
        rows = [
            {"pid": pid, "parent": parent, "rank": ranks.get(pid), "inode": 1001 + number, "command": "python"} | extra
            for number, (pid, parent) in enumerate(parents.items())
        ]
        (node.path / folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    logs = NodeLogs(node.path)
    assert logs.rank_of_pid == {70: None, 71: 0, 72: 1, 73: 1}
    found = sockets_of(logs)
    assert [None if pd.isna(rank) else int(rank) for rank in found["rank"]] == [None, 0, 1, 1, None]


def test_states_without_counters_are_no_loss(tmp_path):
    node = new_node(tmp_path)
    socket = one()
    records = []
    for t_ms, sent, state in ((0, 0, 1), (10, 100, 1), (20, 0, 6), (30, 0, 0)):
        socket.counters["bytes_acked"], socket.state = sent, state
        records.append(socket.record(START_NS + t_ms * MS))
    listening = one(9, 80, ("0.0.0.0", 0))
    listening.state = 10
    node.sockets([*records, listening.record(START_NS + 30 * MS)], 0.01, {})
    assert [row[3] for row in grown(node)] == [100.0]
    log = socket_log(NodeLogs(node.path))
    assert log.sockets["cookie"].tolist() == [1]
    assert log.sockets["closed"].tolist() == [True]


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_chunks_change_nothing_and_totals_are_those_of_the_counters(data, tmp_path_factory):
    node = new_node(tmp_path_factory.mktemp("chunks"))
    count = data.draw(st.integers(1, 5))
    ends = [one(number + 1, 1000 + number, bytes_acked=data.draw(st.integers(0, 1000))) for number in range(count)]
    starts = {socket.cookie: socket.counters["bytes_acked"] for socket in ends}
    records = [socket.record(START_NS) for socket in ends]
    for sample in range(1, data.draw(st.integers(2, 15))):
        for socket in ends:
            more = data.draw(st.integers(0, 3)) * 100
            if more:
                socket.counters["bytes_acked"] += more
                records.append(socket.record(START_NS + sample * 10 * MS))
    node.sockets(records, 0.01, {})
    whole = grown(node)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sockets, "CHUNK_RECORDS", data.draw(st.integers(1, 6)))
        assert sorted(grown(node)) == sorted(whole)
    expected = sum(socket.counters["bytes_acked"] - starts[socket.cookie] for socket in ends)
    assert sum(row[3] for row in whole) == expected


def test_addresses_of_both_families_are_read(tmp_path):
    node = new_node(tmp_path)
    six = Socket(1, ("2001:db8::1", 1), ("2001:db8::2", 65_535))
    mapped = Socket(2, ("::ffff:10.0.0.1", 2), ("::ffff:10.0.0.2", 3))
    node.sockets([six.record(START_NS), mapped.record(START_NS)], 0.01, {})
    table = socket_log(NodeLogs(node.path)).sockets
    assert table["local"].tolist() == ["2001:db8::1", "10.0.0.1"]
    assert table["remote"].tolist() == ["2001:db8::2", "10.0.0.2"]
    assert table["remote_port"].tolist() == [65_535, 3]


def measure(tmp_path, names, edges_ms):
    nodes = {name: NodeLogs(tmp_path / "job" / "nodes" / name) for name in names}
    edges = START_NS + np.array(edges_ms, np.int64) * MS
    borders = Borders(edges, np.arange(len(edges) - 1))
    return flows.measure(nodes, borders, np.arange(borders.bins), Batches(nodes, dict.fromkeys(names, 1), tmp_path))


def test_both_ends_on_one_node_are_a_local_pair(tmp_path):
    node = new_node(tmp_path)
    a = Socket(1, ("127.0.0.1", 1000), ("127.0.0.1", 2000))
    b = Socket(2, ("127.0.0.1", 2000), ("127.0.0.1", 1000))
    records = [a.record(START_NS), b.record(START_NS)]
    a.counters, b.counters = {"bytes_acked": 100}, {"bytes_acked": 30, "bytes_received": 100}
    records += [a.record(START_NS + 10 * MS), b.record(START_NS + 10 * MS)]
    node.sockets(records, 0.01, {1: 0, 2: 1})
    found = measure(tmp_path, ["n0"], [0, 10])
    table = found.flows
    assert table["local"].all()
    assert table["measured_at"].tolist() == ["sender", "sender"]
    assert table[["source_rank", "destination_rank", "payload_bytes"]].to_numpy().tolist() == [
        [0, 1, 100.0],
        [1, 0, 30.0],
    ]
    assert found.total("training_bytes").tolist() == [130.0]


def test_loopback_addresses_of_two_nodes_are_not_a_pair(tmp_path):
    for name, ends in (("n0", (1000, 2000)), ("n1", (2000, 1000))):
        socket = Socket(1, ("127.0.0.1", ends[0]), ("127.0.0.1", ends[1]))
        new_node(tmp_path, name).sockets([socket.record(START_NS)], 0.01, {1: 0})
    table = measure(tmp_path, ["n0", "n1"], [0, 10]).flows
    assert len(table) == 4
    assert table["destination_rank"].isna().sum() == 2


def test_what_only_the_receiver_saw_is_measured_there(tmp_path):
    node = new_node(tmp_path)
    socket = one(remote=("192.0.2.1", 443))
    records = [socket.record(START_NS)]
    socket.counters = {"bytes_acked": 10, "bytes_received": 900}
    node.sockets([*records, socket.record(START_NS + 10 * MS)], 0.01, {})
    table = measure(tmp_path, ["n0"], [0, 10]).flows.set_index("measured_at")
    assert table.loc["sender", "payload_bytes"] == 10
    assert table.loc["receiver", "payload_bytes"] == 900
    assert table.loc["receiver", "source_port"] == 443
    assert pd.isna(table.loc["receiver", "retransmissions"])


@settings(max_examples=25, deadline=None)
@given(
    ends=st.lists(
        st.tuples(
            st.sampled_from([None, 0, 1]),
            st.sampled_from([22, 5001, 5201, 40_000, 41_000]),
            st.sampled_from(["10.0.0.2", "10.0.0.3", "192.0.2.9"]),
            st.integers(0, 10**6),
            st.integers(0, 10**6),
        ),
        min_size=1,
        max_size=12,
    )
)
def test_classes_add_up_to_everything(ends, tmp_path_factory):
    tmp_path = tmp_path_factory.mktemp("classes")
    node = new_node(tmp_path)
    begin, end = [], []
    for number, (_, port, remote, sent, received) in enumerate(ends, start=1):
        socket = Socket(number, ("10.0.0.1", 10_000 + number), (remote, port))
        begin.append(socket.record(START_NS))
        socket.counters = {"bytes_acked": sent, "bytes_received": received}
        end.append(socket.record(START_NS + 10 * MS))
    node.sockets(begin + end, 0.01, {number: one[0] for number, one in enumerate(ends, start=1)})
    found = measure(tmp_path, ["n0"], [0, 3, 7, 10])
    assert set(found.flows["traffic_class"]) <= set(CLASSES)
    parts = [found.total(f"{kind}_bytes") for kind in CLASSES]
    expected = sum(one[3] + one[4] for one in ends)
    assert np.sum(parts) == pytest.approx(expected)
    ranked = found.flows["source_rank"].notna() | found.flows["destination_rank"].notna()
    assert (found.flows["traffic_class"] == "training").tolist() == ranked.tolist()


def test_many_flows_are_kept_by_kind_with_the_same_sums(tmp_path, monkeypatch):
    write_ddp_job(tmp_path / "job", Truth(iterations=6))
    whole = open_job(tmp_path / "job").iterations
    monkeypatch.setattr(flows, "MAX_CELLS", 0)
    kinds = open_job(tmp_path / "job")
    assert len(kinds.logs.traffic.groups) < len(kinds.logs.traffic.flows)
    columns = ["training_bytes", "cross_bytes", "other_bytes", "retransmissions"]
    pd.testing.assert_frame_equal(kinds.iterations[columns], whole[columns])
    assert kinds.flows["bytes_per_iteration"].isna().all()
    assert kinds.rank_iterations["sent_bytes"].notna().all()


def test_cross_traffic_is_known_by_its_logs_and_by_who_sends_it(tmp_path):
    from ringtap.core.append_only_logs import Field, RecordWriter

    node = new_node(tmp_path)
    about = {"source": "sender", "destinations": ["10.0.0.9:7777", "host-without-address:8888"]}
    RecordWriter(node.path / "sent" / "a.rec", [Field("flow", "<u8", "", "index")], about).close()
    (node.path / "sent" / "b.json").write_text(
        '{"start": {"connected": [{"remote_host": "10.0.0.8", "remote_port": 6000}]}}'
    )
    (node.path / "sent" / "c.json").write_text("cut off")
    ends = [("10.0.0.9", 7777), ("10.0.0.7", 8888), ("10.0.0.8", 6000), ("10.0.0.6", 9), ("10.0.0.6", 10)]
    made = [Socket(number, ("10.0.0.1", 100 + number), end) for number, end in enumerate(ends, start=1)]
    node.sockets([socket.record(START_NS) for socket in made], 0.01, {})
    with (node.path / "sockets" / "owners.jsonl").open("a") as file:
        file.write('{"t_ns": 1, "inode": 1004, "pid": 7, "rank": null, "command": "iperf3 --client 10.0.0.6"}\n')
    table = measure(tmp_path, ["n0"], [0, 10]).flows
    by_port = table[table["measured_at"] == "sender"].set_index("destination_port")["traffic_class"]
    assert by_port.to_dict() == {7777: "cross", 8888: "cross", 6000: "cross", 9: "cross", 10: "other"}


def test_connections_of_a_process_without_a_rank_are_the_jobs(tmp_path):
    """A job of one process, with a client and a server in it, and a generator of traffic within the job."""
    node = new_node(tmp_path)
    both = [("127.0.0.1", 4000), ("127.0.0.1", 5001)]
    ends = [both, both[::-1], [("10.0.0.1", 10), ("192.0.2.1", 443)], [("10.0.0.1", 11), ("10.0.0.2", 12)]]
    ends.append([("10.0.0.1", 13), ("192.0.2.1", 443)])
    node.sockets([Socket(number, *end).record(START_NS) for number, end in enumerate(ends, start=1)], 0.01, {})
    commands = ["python train.py", "python train.py", "python train.py", "iperf3 --client 10.0.0.2"]
    with (node.path / "sockets" / "owners.jsonl").open("a") as file:
        for inode, command in enumerate(commands, start=1001):
            file.write(json.dumps({"t_ns": 1, "inode": inode, "pid": 7, "rank": None, "command": command}) + "\n")
    table = measure(tmp_path, ["n0"], [0, 10]).flows
    sent = table[table["measured_at"] == "sender"].set_index("source_port")
    assert sent["traffic_class"].to_dict() == {
        **{4000: "training", 5001: "training", 10: "training"},
        **{11: "cross", 13: "other"},
    }
    assert sent["why"].to_dict() == {
        4000: "between processes of the job",
        5001: "between processes of the job",
        10: "one end is a process of the job",
        11: "sent or received by a traffic generator",
        13: "neither the job's nor cross traffic",
    }


def test_connections_that_carry_little_are_asked_seldom(tmp_path):
    """As the collector does: busy connections in every sample, the others only when all are asked."""
    node = new_node(tmp_path)
    busy, quiet = one(), one(2, 1001)
    records = []
    for t_ms in range(0, 1000, 10):
        busy.counters["bytes_acked"] = 1000 * t_ms
        records.append(busy.record(START_NS + t_ms * MS))
        if t_ms in (0, 600):
            quiet.counters["bytes_acked"] = t_ms
            records.append(quiet.record(START_NS + t_ms * MS))
    node.sockets(records, 0.01, {}, dump_every_s=0.3)
    rows = grown(node)
    assert [row for row in rows if row[0] == 1] == [(1, 300.0, 600.0, 600.0)]
    assert all(row[2] - row[1] == 10 for row in rows if row[0] == 0)


def test_many_connections_are_all_asked_more_seldom_than_planned(tmp_path):
    node = new_node(tmp_path)
    node.sockets([one().record(START_NS + t_ms * MS) for t_ms in (0, 10)], 0.01, {}, dump_every_s=0.3)
    facts = {"state": "ok", "every_s": 0.01, "samples": 900, "missed_samples": 100, "dumps": 5}
    write_json(node.path / "node.json", {"collectors": {"sockets": facts}})
    log = socket_log(NodeLogs(node.path))
    assert (log.every_s, log.all_every_s) == (0.01, 2.0)


@pytest.mark.parametrize("first_ms", [0, 400])
def test_a_connection_that_becomes_busy_grew_since_all_were_asked_before(tmp_path, first_ms):
    """Known with little, or new, and busy from 150 ms on; found so when all are asked, at 400 ms."""
    node = new_node(tmp_path)
    old, new = one(), one(2, 1001)
    records = []
    for t_ms in range(0, 500, 10):
        old.counters["bytes_acked"] = t_ms
        records.append(old.record(START_NS + t_ms * MS))
        if t_ms in range(first_ms, 100, 100) or t_ms >= 400:
            new.counters["bytes_acked"] = max(0, 1000 * (t_ms - 150))
            records.append(new.record(START_NS + t_ms * MS))
    node.sockets(records, 0.01, {}, dump_every_s=0.3)
    rows = [row for row in grown(node) if row[0] == 1]
    assert rows[0] == (1, 100.0, 400.0, 250_000.0)
    assert all(row[2] - row[1] == 10 for row in rows[1:])


def test_a_busy_connection_that_paused_is_asked_in_every_sample_for_a_while(tmp_path):
    node = new_node(tmp_path)
    old, pausing = one(), one(2, 1001)
    records = []
    for t_ms in range(0, 3000, 10):
        old.counters["bytes_acked"] = t_ms
        records.append(old.record(START_NS + t_ms * MS))
        if t_ms in (0, 10, 20, 400, 2900):
            pausing.counters["bytes_acked"] = t_ms
            records.append(pausing.record(START_NS + t_ms * MS))
    node.sockets(records, 0.01, {}, dump_every_s=0.3, asked_by_name_s=1.0)
    rows = [row for row in grown(node) if row[0] == 1]
    assert [row[1:3] for row in rows] == [(0.0, 10.0), (10.0, 20.0), (390.0, 400.0), (2600.0, 2900.0)]


def test_times_of_samples_are_taken_from_the_interfaces_log(tmp_path):
    """A socket that did not change while other samples were taken did not grow then."""
    node = new_node(tmp_path)
    socket = one()
    records = []
    for t_ms, sent in ((0, 0), (100, 100), (117, 300)):
        socket.counters["bytes_acked"] = sent
        records.append(socket.record(START_NS + t_ms * MS))
    node.sockets(records, 0.01, {})
    rounds = [(START_NS + t_ms * MS, 0, 0) for t_ms in (0, 50, 75, 100, 117)]
    node.wide("nic/nic.rec", dict.fromkeys(("eth0.tx_bytes", "eth0.rx_bytes"), "counter"), rounds, every_s=0.01)
    assert [row[1:3] for row in grown(node)] == [(75.0, 100.0), (100.0, 117.0)]


def test_segments_are_lost_unless_the_receiver_reports_later_that_they_arrived_twice():
    """Socket 0 sends 3 segments again, of which 2 had arrived, as it hears later; socket 1 loses both of its two."""
    rows = [(1, 0), (2, 0), (2, 1), (3, 2), (0, 0), (1, 0), (2, 0)]
    records = np.array(rows, [("total_retrans", "u8"), ("dsack_dups", "u8")])
    lost = sockets._lost(records, np.array([0, 0, 0, 0, 1, 1, 1]))
    assert lost.tolist() == [1, 1, 1, 1, 0, 1, 2]


@given(counts=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(0, 3)), max_size=30))
def test_lost_segments_never_come_back(counts):
    counts.sort(key=lambda row: row[0])
    end = np.array([row[0] for row in counts], np.int64)
    columns = {"total_retrans": np.zeros(len(end)), "dsack_dups": np.zeros(len(end))}
    for place, name in enumerate(columns, 1):
        for number in range(3):
            mine = end == number
            columns[name][mine] = np.cumsum([row[place] for row in counts])[mine]
    records = np.zeros(len(end), [(name, "f8") for name in columns])
    for name, values in columns.items():
        records[name] = values
    lost, still = sockets._lost(records, end), columns["total_retrans"] - columns["dsack_dups"]
    for number in range(3):
        mine = np.flatnonzero(end == number)
        for place, row in enumerate(mine):
            assert lost[row] == min(still[mine[place:]])
        assert (np.diff(lost[mine]) >= 0).all()
