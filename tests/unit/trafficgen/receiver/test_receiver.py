"""The receiver against clients that are too many, silent, slow, wrong or hostile."""

from __future__ import annotations

import socket
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil
import pytest

from ringtap.trafficgen import protocol
from ringtap.trafficgen.protocol import FLOW, NOTICE
from ringtap.trafficgen.receiver import worker
from tests.unit.traffic_processes import Serve, children, plan_for, serving, traffic, wait_until

pytestmark = pytest.mark.shares

HELLO = protocol.hello("", 5)
WELCOME = NOTICE.pack(protocol.HELLO_NUMBER, protocol.WELCOME)


def connect(serve: Serve) -> socket.socket:
    return socket.create_connection(("127.0.0.1", serve.port), timeout=10)


def until_end(connection: socket.socket) -> bytes:
    data = b""
    with suppress(ConnectionResetError):
        while more := connection.recv(4096):
            data += more
    return data


def welcome(serve: Serve) -> socket.socket:
    connection = connect(serve)
    connection.sendall(HELLO)
    assert connection.recv(NOTICE.size, socket.MSG_WAITALL) == WELCOME
    return connection


def test_connections_beyond_the_limit_are_told_so() -> None:
    with serving("--max-connections", 3) as serve:
        kept = [welcome(serve) for _ in range(3)]
        for _ in range(2):
            with connect(serve) as fourth:
                fourth.sendall(HELLO)
                assert until_end(fourth) == NOTICE.pack(protocol.HELLO_NUMBER, protocol.FULL)
        kept.pop().close()
        time.sleep(0.2)
        kept.append(welcome(serve))  # there is room again
        for connection in kept:
            connection.close()
        counts = serve.end()
    assert (counts["connections"], counts["refused"], counts["malformed"]) == (4, 2, 0)


@pytest.mark.alone(2)
@pytest.mark.parametrize("said", [b"", HELLO[:30]])
@pytest.mark.parametrize("silent", [50, 700])
def test_silent_strangers_never_keep_a_sender_out(silent: int, said: bytes) -> None:
    """As many as there are places for senders, and more than there are for strangers; those are told apart by age."""
    with serving("--max-connections", 2, "--workers", 1, "--threads", 1) as serve, ExitStack() as stack:
        strangers = []
        for _ in range(silent):
            strangers.append(stack.enter_context(connect(serve)))
            strangers[-1].sendall(said)
        kept = [stack.enter_context(welcome(serve)) for _ in range(2)]
        assert all(flow_is_taken(connection) for connection in kept)
        with connect(serve) as third:
            third.sendall(HELLO)
            assert until_end(third) == NOTICE.pack(protocol.HELLO_NUMBER, protocol.FULL)
        # places are taken from those that have been silent for more than a second, when others come
        dropped, began = max(0, silent - 512), time.monotonic()
        others = []
        while dropped and not is_closed(strangers[dropped - 1]):
            others.append(stack.enter_context(connect(serve)))
            time.sleep(0.2)
            assert time.monotonic() - began < 9, "they were to go before their patience ends"
        assert all(is_closed(stranger) for stranger in strangers[:dropped])
        assert not any(is_closed(stranger) for stranger in strangers[dropped + len(others) + 1 :])
        stack.close()
        assert serve.end()["refused"] == 1


def is_closed(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False


@pytest.mark.alone(2)
def test_a_sender_that_opens_thousands_before_its_first_word_is_no_stranger() -> None:
    """A busy sender connects faster than it writes: all of them are younger than a second, and all are welcome."""
    with serving("--workers", 1, "--threads", 1) as serve, ExitStack() as stack:
        (loop,) = children(serve.process)
        with welcome(serve):
            files = loop.num_fds() - 1  # all are open by now, and this one's
        loop.suspend()  # it meets all of them at once, however long this process takes to connect
        try:
            senders = [stack.enter_context(connect(serve)) for _ in range(700)]
        finally:
            loop.resume()
        wait_until(lambda: loop.num_fds() == files + 700, 30)
        for sender in senders:
            sender.sendall(HELLO)
        for sender in senders:
            assert sender.recv(NOTICE.size, socket.MSG_WAITALL) == WELCOME
            sender.close()
        assert serve.end()["connections"] == 1 + 700


def flow_is_taken(connection: socket.socket) -> bool:
    connection.sendall(FLOW.pack(1, 1) + b"x")
    return NOTICE.unpack(connection.recv(NOTICE.size, socket.MSG_WAITALL))[0] == 1


@pytest.mark.alone(2)
def test_a_hello_that_waits_to_be_read_is_not_taken_for_silence() -> None:
    """Of 600 that knock at once, while the receiver is stopped, all are welcome: there are 512 places for strangers."""
    with serving("--workers", 1, "--threads", 1) as serve, ExitStack() as stack:
        (loop,) = children(serve.process)
        loop.suspend()
        try:
            senders = [stack.enter_context(connect(serve)) for _ in range(600)]
            for sender in senders:
                sender.sendall(HELLO)
        finally:
            loop.resume()
        for sender in senders:
            assert sender.recv(NOTICE.size, socket.MSG_WAITALL) == WELCOME
            sender.close()
        assert serve.end()["connections"] == 600


def test_an_unknown_peer_has_seconds_for_its_first_word() -> None:
    assert worker._HELLO_PATIENCE_S <= 10


@pytest.mark.alone(2)
@pytest.mark.parametrize("threads", [1, 2])
def test_silence_ends_a_connection(threads: int) -> None:
    """--idle 1s is looked after once a second, so it takes from 1 to 2 s, and a busy host some more."""
    with serving("--idle", "1s", "--threads", threads) as serve:
        began = time.monotonic()
        with welcome(serve) as idle, welcome(serve) as midway, welcome(serve) as lively, connect(serve) as mute:
            midway.sendall(FLOW.pack(1, 10) + b"abc")
            lively.settimeout(0.3)
            silent = {idle, midway, mute}
            for connection in silent:
                connection.setblocking(False)
            while silent and time.monotonic() < began + 6:
                lively.sendall(FLOW.pack(1, 1) + b"x")
                time.sleep(0.1)
                for connection in list(silent):
                    with suppress(BlockingIOError):
                        if not connection.recv(100):
                            silent.remove(connection)
            assert not silent
            assert 1 < time.monotonic() - began < 5
            lively.sendall(FLOW.pack(1, 1) + b"x")  # still served
            assert len(lively.recv(NOTICE.size)) == NOTICE.size
        counts = serve.end()
    assert (counts["idle"], counts["unfinished"], counts["malformed"]) == (2, 1, 1)


def test_a_hello_in_drops_is_no_way_to_stay() -> None:
    """A byte each 0.4 s would keep a connection for 20 s with a hello of 52 bytes, and for hours with the default."""
    with serving("--idle", "1s") as serve, connect(serve) as slow:
        began = time.monotonic()
        ended = False
        for at in range(len(HELLO)):
            try:
                slow.sendall(HELLO[at : at + 1])
            except OSError:
                ended = True
                break
            time.sleep(0.4)
        assert ended
        assert time.monotonic() - began < 6
        assert serve.end()["malformed"] == 1


def test_a_hello_in_pieces_is_a_hello() -> None:
    with serving() as serve, connect(serve) as slow:
        for at in range(0, len(HELLO), 13):
            slow.sendall(HELLO[at : at + 13])
            time.sleep(0.02)
        slow.sendall(FLOW.pack(3, 4)[:7])
        time.sleep(0.02)
        slow.sendall(FLOW.pack(3, 4)[7:] + b"ab")
        time.sleep(0.02)
        slow.sendall(b"cd")
        slow.shutdown(socket.SHUT_WR)
        answer = until_end(slow)
    assert answer[: NOTICE.size] == WELCOME
    assert [number for number, _ in NOTICE.iter_unpack(answer[NOTICE.size :])] == [3]


@pytest.mark.parametrize(
    ("said", "notices", "counts"),
    [
        (b"", [], (0, 0, 0)),
        (HELLO[:30], [], (1, 0, 0)),
        (HELLO, [5], (0, 0, 0)),
        (HELLO + FLOW.pack(1, 9)[:11], [5], (1, 0, 0)),
        (HELLO + FLOW.pack(1, 9) + b"abc", [5], (0, 1, 0)),
        (HELLO + FLOW.pack(1, 3) + b"abc" + FLOW.pack(2, 5), [5, 1], (0, 1, 1)),
        (HELLO + FLOW.pack(1, protocol.OPEN_ENDED), [5, 1], (0, 0, 1)),
        (HELLO + FLOW.pack(1, protocol.OPEN_ENDED | protocol.LAST) + b"abc", [5, 1], (0, 0, 1)),
        (HELLO + FLOW.pack(1, 3 | protocol.LAST) + b"abc", [5, 1], (0, 0, 1)),
        (HELLO + FLOW.pack(1, 0), [5], (1, 0, 0)),
        (HELLO + FLOW.pack(1, protocol.OPEN_ENDED + 1), [5], (1, 0, 0)),
        (HELLO + FLOW.pack(protocol.HELLO_NUMBER, 3) + b"abc", [5], (1, 0, 0)),
        (b"GET / HTTP/1.1\r\nHost: ringtap.example\r\nAccept: */*\r\n\r\n", [], (1, 0, 0)),
    ],
)
def test_half_closed_wherever_it_may_be(said: bytes, notices: list[int], counts: tuple[int, int, int]) -> None:
    """What a connection said before it shut its side down; (malformed, unfinished, flows) that are counted."""
    with serving() as serve:
        with connect(serve) as connection:
            connection.sendall(said)
            connection.shutdown(socket.SHUT_WR)
            answer = until_end(connection)
        summary = serve.end()
    numbers = [5 if number == protocol.HELLO_NUMBER else number for number, _ in NOTICE.iter_unpack(answer)]
    assert numbers == notices
    assert (summary["malformed"], summary["unfinished"], summary["flows"]) == counts


def test_memory_and_files_do_not_grow_with_malformed_connections() -> None:
    """After 1000 to warm up, 3000 more. What it keeps of each would be 1 kB at least: 3 MB. Allocators move by less."""
    bad = (b"", HELLO[:20], b"x" * 60, HELLO + FLOW.pack(1, 0), HELLO + FLOW.pack(1, 99) + b"abc", HELLO + b"\xff" * 15)

    def knock(times: int) -> None:
        for number in range(times):
            with connect(serve) as connection:
                connection.sendall(bad[number % len(bad)])
                if number % 3 == 0:
                    linger = (1).to_bytes(4, "little") + bytes(4)
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            if number % 100 == 99:
                with welcome(serve):  # it has taken all before this one: they do not gather in the kernel
                    pass

    with serving() as serve:
        (worker,) = children(serve.process)
        with welcome(serve):
            files = worker.num_fds() - 1  # all are open by now, and this one's
        knock(1000)
        before = _settled_rss(worker, files)
        knock(3000)
        after = _settled_rss(worker, files)
        counts = serve.end()
    assert after - before < 2_000_000
    assert counts["malformed"] > 1500
    assert counts["unfinished"] > 300


def _settled_rss(process: psutil.Process, files: int) -> int:
    wait_until(lambda: process.num_fds() == files, 5)
    return int(process.memory_info().rss)


@pytest.mark.parametrize("bind", ["0.0.0.0:0", "[::]:0"])
def test_beyond_loopback_a_token_is_needed(bind: str, tmp_path: Path) -> None:
    done = traffic("serve", "--bind", bind, expect=2)
    assert "give --token-file or set RINGTAP_TOKEN" in done.stderr.splitlines()[-1]
    (tmp_path / "token").write_text("t\n")
    with serving("--bind", bind, "--token-file", tmp_path / "token") as serve, connect(serve) as stranger:
        stranger.sendall(HELLO)
        assert until_end(stranger) == NOTICE.pack(protocol.HELLO_NUMBER, protocol.WRONG_TOKEN)
        assert serve.end()["refused"] == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--workers", 0), "--workers"),
        (("--threads", 0), "--threads"),
        (("--max-connections", 0), "--max-connections"),
        (("--idle", "10ms"), "--idle"),
        (("--bind", "127.0.0.1:0", "--token", "t"), "--token shows the token to every user of this host"),
        (("--bind", "127.0.0.1:0", "--token-file", "/no/such"), "/no/such cannot be read: No such file"),
        (("--bind", "127.0.0.1:0", "--token-file", "/dev/null"), "/dev/null holds no token"),
    ],
)
def test_what_cannot_be_served_is_refused(arguments: tuple[object, ...], words: str) -> None:
    assert words in traffic("serve", *arguments, expect=2).stderr.splitlines()[-1]


def test_an_address_of_another_host_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RINGTAP_TOKEN", "t")
    said = traffic("serve", "--bind", "203.0.113.1:5001", expect=2).stderr.splitlines()[-1]
    assert "cannot listen on 203.0.113.1:5001" in said


def test_no_command_line_shows_the_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the environment, a file, and a descriptor: flows pass, and ps shows the word for none of the processes."""
    word = "open-sesame"
    (tmp_path / "token").write_text(f"{word}\n")
    with serving("--token-file", tmp_path / "token") as serve:
        plan = plan_for(tmp_path, serve.address)
        monkeypatch.setenv("RINGTAP_TOKEN", word)
        traffic("send", plan)
        monkeypatch.setenv("RINGTAP_TOKEN", "another")
        traffic("send", plan, expect=1)
        with (tmp_path / "token").open() as file:
            traffic("send", plan, "--token-file", f"/dev/fd/{file.fileno()}", pass_fds=[file.fileno()])
        processes = [psutil.Process(serve.process.pid), *children(serve.process)]
        assert not [one for one in processes if word in " ".join(one.cmdline())]
        assert word not in " ".join(serve.words)
