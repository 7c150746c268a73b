"""A receiver fed with anything: it drops and counts the malformed, and goes on serving."""

from __future__ import annotations

import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringtap.trafficgen import protocol
from ringtap.trafficgen.protocol import FLOW, HELLO, MAGIC, NOTICE

pytestmark = [pytest.mark.computes, pytest.mark.long]

WELCOME = NOTICE.pack(protocol.HELLO_NUMBER, protocol.WELCOME)


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    process = subprocess.Popen(
        [sys.executable, "-m", "ringtap.cli", "traffic", "serve", "--bind", "127.0.0.1:0"],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("listening on "):
            break
    yield int(line.rsplit(":", 1)[1])
    process.terminate()
    _, err = process.communicate(timeout=10)
    assert process.returncode == 0
    assert err == ""


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=5)


def read(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = connection.recv(size - len(data))
        if not more:
            break
        data += more
    return data


def serves(port: int) -> bool:
    with connect(port) as connection:
        connection.sendall(protocol.hello("", 5) + FLOW.pack(7, 3) + b"abc")
        answer = read(connection, 2 * NOTICE.size)
    return answer[: NOTICE.size] == WELCOME and NOTICE.unpack(answer[NOTICE.size :])[0] == 7


@dataclass(frozen=True)
class Talk:
    """What one client says, in what pieces, and how it ends after so many bytes: whole, half-closed or reset.

    Flows have a size, or 0: without end, which only the last can be; the last may be marked so.
    """

    sizes: tuple[int, ...]
    last: bool
    cut: float
    end: str
    pieces: tuple[int, ...]

    def said(self) -> bytes:
        data = protocol.hello("", 5)
        for number, size in enumerate(self.sizes):
            word = size or protocol.OPEN_ENDED
            word |= protocol.LAST if self.last and number == len(self.sizes) - 1 else 0
            data += FLOW.pack(number, word) + bytes(size or 1000)
        return data if self.end == "whole" else data[: int(self.cut * len(data))]

    def answers(self) -> list[int]:
        """The numbers of the notices that are due for what it said, its own side being shut down at the end."""
        left = len(self.said()) - HELLO.size
        if left < 0:
            return []
        numbers = [protocol.HELLO_NUMBER]
        for number, size in enumerate(self.sizes):
            left -= FLOW.size + size
            if left < 0:
                break
            numbers.append(number)
        return numbers


talks = st.builds(
    Talk,
    st.tuples(st.lists(st.sampled_from([1, 5, 3000, 65_536, 65_537, 200_000]), max_size=3), st.booleans()).map(
        lambda drawn: (*drawn[0], 0) if drawn[1] else (*drawn[0], 7)
    ),
    st.booleans(),
    st.floats(0, 1),
    st.sampled_from(["whole", "half-closed", "reset"]),
    st.lists(st.sampled_from([1, 3, 15, 16, 17, 51, 53, 1000, 70_000]), min_size=1, max_size=8).map(tuple),
)


@given(clients=st.lists(talks, min_size=1, max_size=5))
@settings(max_examples=300, deadline=None)
def test_each_client_is_answered_whatever_the_others_do(port: int, clients: list[Talk]) -> None:
    """Their pieces go out in turns; who ends midway takes nothing from the others, and gets what was due to it."""
    connections = [connect(port) for _ in clients]
    left = [talk.said() for talk in clients]
    for turn in range(8):
        for at, (talk, connection) in enumerate(zip(clients, connections, strict=True)):
            size = talk.pieces[turn % len(talk.pieces)]
            connection.sendall(left[at][:size])
            left[at] = left[at][size:]
    for talk, connection, rest in zip(clients, connections, left, strict=True):
        connection.sendall(rest)
        if talk.end == "reset":
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.close()
        else:
            with suppress(OSError):  # after its last flow the receiver has closed already
                connection.shutdown(socket.SHUT_WR)
    for talk, connection in zip(clients, connections, strict=True):
        if talk.end != "reset":
            with connection:
                answer = read(connection, NOTICE.size * (len(talk.sizes) + 2))
            assert [number for number, _ in NOTICE.iter_unpack(answer)] == talk.answers()
    assert serves(port)


starts = st.sampled_from([b"", protocol.hello("", 5), protocol.hello("other", 5), protocol.hello("", 5)[:20], MAGIC])
heads = st.builds(
    FLOW.pack,
    st.integers(0, 2**64 - 1),
    st.sampled_from([0, 1, 5, 70_000, 2**62 - 1, 2**62, 2**62 + 1, 2**63, 2**63 + 3, 2**64 - 1]),
)
pieces = st.lists(st.one_of(heads, st.binary(max_size=40)), max_size=6)


@given(start=starts, rest=pieces, linger=st.booleans())
@settings(max_examples=80, deadline=None)
def test_no_bytes_stop_the_receiver(port: int, start: bytes, rest: list[bytes], linger: bool) -> None:
    with connect(port) as connection:
        try:
            for piece in (start, *rest):
                connection.sendall(piece)
        except OSError:
            pass
        if linger:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    assert serves(port)


def test_an_open_ended_flow_ends_with_its_connection_and_a_last_one_ends_it(port: int) -> None:
    with connect(port) as connection:
        connection.sendall(protocol.hello("", 5) + FLOW.pack(1, 3) + b"abc" + FLOW.pack(2, protocol.OPEN_ENDED))
        connection.sendall(bytes(200_000))
        connection.shutdown(socket.SHUT_WR)
        answer = read(connection, 4 * NOTICE.size)
    assert [number for number, _ in NOTICE.iter_unpack(answer)] == [protocol.HELLO_NUMBER, 1, 2]
    with connect(port) as connection:
        connection.sendall(protocol.hello("", 5) + FLOW.pack(1, 70_000 | protocol.LAST) + bytes(70_000))
        answer = read(connection, 4 * NOTICE.size)
    assert [number for number, _ in NOTICE.iter_unpack(answer)] == [protocol.HELLO_NUMBER, 1]


@given(sizes=st.lists(st.integers(1, 300_000), min_size=1, max_size=5), cuts=st.lists(st.integers(1, 5000), min_size=1))
@settings(max_examples=20, deadline=None)
def test_flows_are_complete_however_they_are_cut(port: int, sizes: list[int], cuts: list[int]) -> None:
    """Every flow is acknowledged once, in order, whatever pieces its bytes come in."""
    data = protocol.hello("", 5) + b"".join(FLOW.pack(number, size) + bytes(size) for number, size in enumerate(sizes))
    with connect(port) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        at = 0
        for cut in cuts:
            connection.sendall(data[at : at + cut])
            at += cut
        connection.sendall(data[at:])
        answer = read(connection, NOTICE.size * (1 + len(sizes)))
    numbers = [number for number, _ in NOTICE.iter_unpack(answer)]
    assert numbers == [protocol.HELLO_NUMBER, *range(len(sizes))]


@pytest.mark.parametrize(
    ("hello", "verdict"),
    [
        (protocol.hello("other", 5), protocol.WRONG_TOKEN),
        (HELLO.pack(MAGIC, protocol.VERSION + 1, protocol.token_digest(""), 5), protocol.WRONG_VERSION),
    ],
)
def test_a_refusal_says_why(port: int, hello: bytes, verdict: int) -> None:
    with connect(port) as connection:
        connection.sendall(hello)
        assert read(connection, 100) == NOTICE.pack(protocol.HELLO_NUMBER, verdict)


def test_a_sender_that_reads_no_answers_is_read_no_further(port: int) -> None:
    """Answers to it would pile up in the receiver's memory otherwise."""
    one = FLOW.pack(1, 1) + b"x"
    with connect(port) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.sendall(protocol.hello("", 5))
        connection.settimeout(1)
        sent = 0
        try:
            while sent < 50_000_000:
                sent += connection.send(one * 4096)
        except TimeoutError:
            pass
        assert sent < 50_000_000
        assert serves(port)
