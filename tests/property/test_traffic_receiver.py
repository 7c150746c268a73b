"""A receiver fed with anything: it drops and counts the malformed, and goes on serving."""

from __future__ import annotations

import socket
import struct
import subprocess
import sys
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringtap.trafficgen import protocol
from ringtap.trafficgen.protocol import FLOW, HELLO, MAGIC, NOTICE

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
        connection.sendall(protocol.hello("") + FLOW.pack(7, 3) + b"abc")
        answer = read(connection, 2 * NOTICE.size)
    return answer[: NOTICE.size] == WELCOME and NOTICE.unpack(answer[NOTICE.size :])[0] == 7


starts = st.sampled_from([b"", protocol.hello(""), protocol.hello("other"), protocol.hello("")[:20], MAGIC])
heads = st.builds(FLOW.pack, st.integers(0, 2**64 - 1), st.sampled_from([0, 1, 5, 2**63 - 1, 2**63, 2**64 - 1]))
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


@given(sizes=st.lists(st.integers(1, 300_000), min_size=1, max_size=5), cuts=st.lists(st.integers(1, 5000), min_size=1))
@settings(max_examples=20, deadline=None)
def test_flows_are_complete_however_they_are_cut(port: int, sizes: list[int], cuts: list[int]) -> None:
    """Every flow is acknowledged once, in order, whatever pieces its bytes come in."""
    data = protocol.hello("") + b"".join(FLOW.pack(number, size) + bytes(size) for number, size in enumerate(sizes))
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
        (protocol.hello("other"), protocol.WRONG_TOKEN),
        (HELLO.pack(MAGIC, 2, protocol.token_digest("")), protocol.WRONG_VERSION),
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
        connection.sendall(protocol.hello(""))
        connection.settimeout(1)
        sent = 0
        try:
            while sent < 50_000_000:
                sent += connection.send(one * 4096)
        except TimeoutError:
            pass
        assert sent < 50_000_000
        assert serves(port)
