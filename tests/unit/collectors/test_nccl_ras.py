"""NCCL's RAS service: a process that speaks its protocol as src/ras/client_support.cc does, asked over loopback."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ringtap.collectors import nccl_ras
from ringtap.collectors.collector_interface import Context
from ringtap.collectors.nccl_ras import NcclRasCollector, listening_inodes, parse_address
from ringtap.core.append_only_logs import open_records

pytestmark = pytest.mark.shares

# The service, in a process of rank 0. The arguments are what it does, and a file with the communicators of one answer
# a line; the last line is for all further questions. "PID" stands for its own pid.
SERVICE = """
import json, os, socket, sys, time
does, answers = sys.argv[1], [line.rstrip() for line in open(sys.argv[2])]
server = socket.create_server(("127.0.0.1", 0), backlog=16)
print(server.getsockname()[1], flush=True)
if does == "stopped":
    time.sleep(60)
while True:
    client, _ = server.accept()
    lines = client.makefile("rb")
    for line in lines:
        command = line.strip().lower()
        if does == "web":
            client.sendall(b"HTTP/1.0 400 Bad request\\r\\n\\r\\n")
            break
        if command.startswith(b"client protocol "):
            client.sendall(b"SERVER PROTOCOL 2\\n")
        elif command == b"set format json" and does != "text":
            client.sendall(b"OK\\n")
        elif command == b"status":
            answer = answers.pop(0) if len(answers) > 1 else answers[0]
            communicators = json.loads(answer.replace('"PID"', str(os.getpid())))
            item = {"nccl_version": "2.29.1", "communicators_count": len(communicators)}
            item |= {"communicators": communicators, "ras": {"collection_time_sec": 0.0, "timeouts_count": 0}}
            text = json.dumps(item, indent=2).encode() + b"\\n"
            if does == "long":
                text = b" " * (5 << 20) + text
            text = text[:-40] if does == "truncated" else text
            for begin in range(0, len(text), 1 << 16):
                try:
                    client.sendall(text[begin:begin + (1 << 16)])
                except OSError:
                    break
                if does == "slow":
                    time.sleep(0.2)
            break
        else:
            client.sendall(b"ERROR: Unknown command " + line.strip() + b"\\n")
    lines.close()
    client.close()
"""
HASH = "0xae94423cfbb2ef4a"
OPERATIONS = ("Broadcast", "Reduce", "AllGather", "ReduceScatter", "AllReduce")


def rank(number: int, reduces: int, *, pid: Any = 1, error: int = 0) -> dict[str, Any]:
    status = {"init_state": 0, "async_error": error, "finalize_called": False, "destroy_flag": False}
    item = {"rank": number, "host": "10.0.0.4", "pid": "PID" if number == 0 else pid, "cuda_dev": 0, "nvml_dev": 0}
    item |= {"status": status | {"abort_flag": False}}
    return item | {"collective_counts": dict.fromkeys(OPERATIONS, 0) | {"AllReduce": reduces, "Broadcast": 1}}


def missing(number: int, *, unresponsive: bool = True, dead: bool = False) -> dict[str, Any]:
    status = {"unresponsive": unresponsive, "considered_dead": dead}
    return {"rank": number, "host": "10.0.0.5", "pid": 7, "cuda_dev": 1, "nvml_dev": 1, "status": status}


def communicator(ranks: list[dict[str, Any]], absent: tuple[dict[str, Any], ...] = ()) -> dict[str, Any]:
    item = {"hash": HASH, "secondary_hash": "0xb7:0xb8", "size": len(ranks) + len(absent)}
    item |= {"ranks_count": len(ranks), "missing_ranks_count": len(absent)}
    return item | {"ranks": ranks, "missing_ranks": list(absent)}


class Service:
    """A process that listens as rank 0 of a job does, and the collector beside it."""

    def __init__(self, folder: Path, does: str, answers: list[Any], environment: dict[str, str] | None = None) -> None:
        self.folder = folder
        (folder / "answers").write_text("".join(json.dumps(answer) + "\n" for answer in answers))
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        address = {"RANK": "0", "NCCL_RAS_ADDR": f"127.0.0.1:{port}"}
        script = SERVICE.replace('("127.0.0.1", 0)', f'("127.0.0.1", {port})')
        command = [sys.executable, "-c", script, does, str(folder / "answers")]
        self.process = subprocess.Popen(
            command, env=os.environ | address | (environment or {}), stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout
        self.process.stdout.readline()
        self.process.stdout.close()
        self.collector = NcclRasCollector(Context(folder, 0.1, lambda: [self.process.pid]))
        self.collector.start()

    def sample(self, times: int) -> dict[str, Any]:
        """Take samples, and return the collector's facts."""
        for _ in range(times):
            self.collector.sample()
        return self.collector.stop()

    def events(self) -> list[tuple[int, str]]:
        lines = (self.folder / "nccl-ras/ranks.jsonl").read_text().splitlines()
        return [(line["rank"], line["state"]) for line in map(json.loads, lines)]

    def rows(self) -> list[tuple[Any, ...]]:
        return [row[2:] for row in open_records(self.folder / "nccl-ras/communicators.rec").walk()]


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(nccl_ras, "_COST_SHARE", 1e9)  # finding the service costs what it costs here
    monkeypatch.setattr(nccl_ras, "_BYTES_PER_S", 1e9)
    monkeypatch.setattr(nccl_ras, "_LOOK_S", 2.0)  # on a busy machine
    started: list[Service] = []

    def start(*args: Any, **kwargs: Any) -> Service:
        started.append(Service(tmp_path, *args, **kwargs))
        return started[-1]

    yield start
    for one in started:
        one.process.kill()
        one.process.wait()


def test_a_record_has_the_ranks_and_the_least_and_most_collectives(service: Any) -> None:
    one = service("json", [[communicator([rank(0, 40), rank(1, 39)])], [communicator([rank(0, 50), rank(1, 50)])]])
    facts = one.sample(2)
    assert one.rows() == [(int(HASH, 16), 2, 2, 0, 0, 0, 0, 40, 41), (int(HASH, 16), 2, 2, 0, 0, 0, 0, 51, 51)]
    assert one.events() == []  # counts that differ once say nothing
    assert facts.pop("reason") == "2 answers of the RAS service of NCCL 2.29.1"
    assert facts == {"answers": 2, "unanswered": 0, "damaged": 0, "of_other_jobs": 0}


def test_a_rank_is_unresponsive_then_dead_then_answers(service: Any) -> None:
    absent = [communicator([rank(0, 9)], (missing(1, dead=dead),)) for dead in (False, False, True)]
    one = service("json", [*([answer] for answer in absent), [communicator([rank(0, 9), rank(1, 9)])]])
    one.sample(4)
    assert one.events() == [(1, "unresponsive"), (1, "dead"), (1, "answers")]
    assert [row[1:6] for row in one.rows()] == [(2, 1, 1, 1, 0), (2, 1, 1, 1, 0), (2, 1, 1, 1, 1), (2, 2, 0, 0, 0)]


def test_a_rank_is_behind_while_no_count_changes(service: Any) -> None:
    stuck, on = [communicator([rank(0, 9), rank(1, 8)])], [communicator([rank(0, 12), rank(1, 12)])]
    one = service("json", [stuck, stuck, stuck, on, on])
    one.sample(5)
    assert one.events() == [(1, "behind"), (1, "answers")]
    line = json.loads((one.folder / "nccl-ras/ranks.jsonl").read_text().splitlines()[0])
    assert (line["communicator"], line["size"], line["operations"], line["most_operations"]) == (HASH, 2, 9, 10)


def test_an_error_of_nccl_is_a_state_and_a_reachable_rank_that_left_is_missing(service: Any) -> None:
    left = missing(1, unresponsive=False)
    one = service("json", [[communicator([rank(0, 9, error=6)], (left,))], [communicator([rank(0, 9, error=7)])]])
    one.sample(2)
    assert one.events() == [(0, "failed"), (1, "missing"), (0, "answers")]  # 7: NCCL is still at work


@pytest.mark.parametrize(
    ("does", "why"),
    [
        ("text", "its RAS service has no JSON, which came with NCCL 2.28.7"),
        ("web", "what listens there is no RAS service of NCCL"),
        ("long", "an answer of its RAS service has more than 4 MiB"),
    ],
)
def test_a_service_that_cannot_be_used_is_asked_once(service: Any, does: str, why: str) -> None:
    one = service(does, [[communicator([rank(0, 9)])]])
    one.collector.sample()
    one.process.kill()
    one.process.wait()
    facts = one.sample(3)
    assert (facts["state"], facts["reason"], facts["unanswered"]) == ("unavailable", why, 0)
    assert facts["remedy"].startswith("nothing")


@pytest.mark.parametrize(
    "answer",
    [
        [{"hash": "garbage"}],
        [communicator([rank(0, -1)])],
        [communicator([rank(0, 2**63)])],
        [dict(communicator([rank(0, 1)]), hash="0x" + "f" * 17)],
        [dict(communicator([]), missing_ranks=[{"rank": 1}])],
        {},
    ],
)
def test_an_answer_of_another_shape_is_counted_and_left_out(service: Any, answer: Any) -> None:
    one = service("json", [answer, [communicator([rank(0, 9)])]])
    facts = one.sample(2)
    assert (facts["damaged"], facts["answers"], len(one.rows())) == (1, 1, 1)


def test_a_truncated_answer_is_counted(service: Any, tmp_path: Path) -> None:
    facts = service("truncated", [[communicator([rank(0, 9)])]]).sample(1)
    assert (facts["damaged"], facts["answers"], facts["state"]) == (1, 0, "unavailable")
    assert facts["reason"] == "NCCL's RAS service gave no answer that can be used"
    assert not (tmp_path / "nccl-ras").exists()


def test_an_answer_that_comes_late_is_read_at_a_later_sample(service: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    many = [rank(number, 9) for number in range(400)]  # 3 pieces, 0.2 s apart
    one = service("slow", [[communicator(many)]])
    monkeypatch.setattr(nccl_ras, "_LOOK_S", 0.01)
    begun_s, samples = time.monotonic(), 0
    while not one.collector._counts["answers"] and time.monotonic() < begun_s + 20:
        one.collector.sample()
        samples += 1
        time.sleep(0.05)
    assert samples > 2
    assert one.rows()[0][1:3] == (400, 400)


def test_a_service_that_never_answers_costs_little_time(service: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    one = service("stopped", [[]])
    monkeypatch.setattr(nccl_ras, "_LOOK_S", 0.1)
    monkeypatch.setattr(nccl_ras, "_ANSWER_S", 0.15)
    begun_s = time.monotonic()
    facts = one.sample(4)  # two questions, each over two samples
    assert time.monotonic() - begun_s < 2.5  # a second is for an answer at the end
    assert (facts["unanswered"], facts["answers"], facts["state"]) == (2, 0, "unavailable")


def test_a_service_of_another_job_is_not_recorded(service: Any) -> None:
    other = communicator([rank(1, 9, pid=2**22)])
    one = service("json", [[other], [], [communicator([rank(0, 9)])]])
    facts = one.sample(3)
    assert (facts["of_other_jobs"], facts["answers"], len(one.rows())) == (1, 2, 1)


@pytest.mark.parametrize("environment", [{"RANK": "1"}, {"RANK": ""}, {"NCCL_RAS_ADDR": "nonsense"}])
def test_nobody_is_asked_without_a_service_of_rank_0(service: Any, environment: dict[str, str]) -> None:
    one = service("json", [[communicator([rank(0, 9)])]], environment)
    facts = one.sample(2)
    assert facts["reason"] == "no process of rank 0 on this node listened for NCCL's RAS service"
    assert (facts["state"], facts["answers"], facts["unanswered"]) == ("unavailable", 0, 0)


def test_a_port_of_a_process_beside_the_job_is_left_alone(service: Any) -> None:
    """Whoever listens at the default port of a node need not be the job."""
    one = service("json", [[communicator([rank(0, 9)])]])
    stranger = subprocess.Popen(["sleep", "60"], env=os.environ | {"RANK": "0", "NCCL_RAS_ADDR": _address(one)})
    try:
        one.collector._pids = lambda: [stranger.pid]
        assert one.sample(2)["state"] == "unavailable"
    finally:
        stranger.kill()
        stranger.wait()


def _address(one: Service) -> str:
    variables = Path(f"/proc/{one.process.pid}/environ").read_bytes().decode().split("\0")
    return next(text.partition("=")[2] for text in variables if text.startswith("NCCL_RAS_ADDR="))


def test_listening_sockets_are_found_by_their_port(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        inode = int(str(Path(f"/proc/self/fd/{server.fileno()}").readlink())[8:-1])
        assert listening_inodes(Path("/proc/net"), server.getsockname()[1]) == {inode}
    rest = "00000000:00000000 00:00000000 00000000 1000 0"
    lines = [f"0: {'0' * 32}:6D7C {'0' * 32}:0000 0A {rest} 77 1", f"1: {'0' * 32}:6D7C {'0' * 32}:0001 01 {rest} 78 1"]
    (tmp_path / "tcp6").write_text("\n".join(["head", *lines]) + "\n")
    assert listening_inodes(tmp_path, 28028) == {77}


@pytest.mark.parametrize(
    ("text", "address"),
    [("localhost:28028", ("localhost", 28028)), ("[::1]:5", ("::1", 5)), ("10.0.0.4:7", ("10.0.0.4", 7))],
)
def test_addresses_are_nccls(text: str, address: tuple[str, int]) -> None:
    assert parse_address(text) == address


def test_the_check_says_where_it_will_ask_and_what_turns_the_service_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = NcclRasCollector(Context(tmp_path, 0.1)).check
    monkeypatch.delenv("NCCL_RAS_ADDR", raising=False)
    monkeypatch.delenv("NCCL_RAS_ENABLE", raising=False)
    with monkeypatch.context() as patch:
        patch.setattr(NcclRasCollector, "net", tmp_path)
        assert check().state == "ok"
        assert "at localhost:28028, where nothing listens now" in check().reason
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("NCCL_RAS_ADDR", f"localhost:{server.getsockname()[1]}")
        assert check().reason.endswith("where a process listens now")
    monkeypatch.setenv("NCCL_RAS_ADDR", "10.0.0.4")
    assert check().reason == "NCCL_RAS_ADDR='10.0.0.4' is not HOST:PORT"
    monkeypatch.setenv("NCCL_RAS_ENABLE", "0")
    assert (check().state, check().remedy) == ("unavailable", "unset NCCL_RAS_ENABLE")
