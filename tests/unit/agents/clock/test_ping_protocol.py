"""The responder answers the run's own datagrams and nothing else, never at greater length."""

import errno
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringtap.agents.clock.local_clock import Clock
from ringtap.agents.clock.ping_protocol import (
    LAST,
    PING,
    PONG,
    SIZE,
    Datagram,
    Responder,
    open_socket,
    pings,
    receive,
    unpack,
)

pytestmark = pytest.mark.shares

TOKEN = bytes(range(16))
CLIENT = b"12345678"


@contextmanager
def responder(token: bytes = TOKEN, clock: Clock | None = None) -> Iterator[Responder]:
    """A responder on the loopback, serving on a thread."""
    served = Responder(["127.0.0.1"], token, clock or Clock(), lambda askers: 1000 * askers, lambda: 0)
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            served.serve(5)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield served
    finally:
        stop.set()
        served.wake()
        thread.join(5)
        assert not thread.is_alive()
        served.close()


def ask(port: int, data: bytes, timeout_s: float = 0.3) -> bytes | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.settimeout(timeout_s)
        sock.sendto(data, ("127.0.0.1", port))
        try:
            return sock.recv(4096)
        except TimeoutError:
            return None


def test_four_times_in_their_order_and_the_kernels_stamps() -> None:
    with responder() as served:
        found = list(pings("127.0.0.1", served.port, TOKEN, CLIENT, Clock(), range(20), 1.0))
    answered = [ping for ping in found if ping is not None]
    assert len(answered) == 20
    for ping in answered:
        assert ping.t1_ns <= ping.t2_ns <= ping.t3_ns <= ping.t4_ns
        assert abs(ping.offset_ns) <= ping.round_trip_ns / 2 + 1, "both ends have one clock"
        assert ping.wish_s == 1.0
    assert answered[-1].kernel_stamps == 3


def test_an_answer_is_as_long_as_its_question() -> None:
    with responder() as served:
        question = Datagram(PING, 0, CLIENT, 7, sent_ns=5).pack(TOKEN)
        answer = ask(served.port, question)
    assert answer is not None
    assert len(question) == len(answer) == SIZE
    pong = unpack(answer, TOKEN)
    assert pong is not None
    assert (pong.kind, pong.client, pong.sequence, pong.sent_ns) == (PONG, CLIENT, 7, 5)
    assert TOKEN not in question + answer, "the token does not cross the network"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"x" * SIZE,
        Datagram(PING, 0, CLIENT, 0).pack(b"y" * 16),
        Datagram(PING, 0, CLIENT, 0).pack(TOKEN)[:-1],
        Datagram(PING, 0, CLIENT, 0).pack(TOKEN) + b"x",
        Datagram(PONG, 0, CLIENT, 0).pack(TOKEN),
        b"x" * 9000,
    ],
    ids=["empty", "noise", "another token", "short", "long", "an answer", "huge"],
)
def test_what_is_not_the_runs_own_is_not_answered(data: bytes) -> None:
    with responder() as served:
        assert ask(served.port, data) is None
        assert ask(served.port, Datagram(PING, 0, CLIENT, 0).pack(TOKEN)) is not None, "it still serves"
        assert served.answered == 1
        assert served.refused == 1


@given(st.binary(max_size=2 * SIZE))
def test_no_bytes_make_a_datagram_but_those_with_the_digest(data: bytes) -> None:
    assert unpack(data, TOKEN) is None


@given(st.integers(0, SIZE - 1), st.integers(1, 255))
def test_one_changed_byte_is_noticed(place: int, change: int) -> None:
    data = bytearray(Datagram(PING, 0, CLIENT, 1, sent_ns=123456789).pack(TOKEN))
    data[place] ^= change
    assert unpack(bytes(data), TOKEN) is None


@pytest.mark.alone(2)
def test_a_flood_of_strangers_does_not_take_the_processor() -> None:
    with responder() as served, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        began_s = time.monotonic()
        while time.monotonic() < began_s + 1.0:
            sock.sendto(b"x" * SIZE, ("127.0.0.1", served.port))
        # at most so many a turn, and then a rest
        assert served.refused <= 100 * (1.5 / 0.05)
        # what the kernel had queued of it goes first, and took the place of what came then
        tries = (ask(served.port, Datagram(PING, 0, CLIENT, 1).pack(TOKEN)) for _ in range(10))
        assert any(answer is not None for answer in tries)


def test_it_knows_who_has_still_to_ping() -> None:
    with responder() as served:
        ask(served.port, Datagram(PING, 0, b"aaaaaaaa", 1).pack(TOKEN))
        ask(served.port, Datagram(PING, 0, b"bbbbbbbb", 1).pack(TOKEN))
        assert served.waiting(10) == 2
        ask(served.port, Datagram(LAST, 0, b"aaaaaaaa", 2).pack(TOKEN))
        assert served.waiting(10) == 1
        assert served.waiting(0) == 0


def test_a_port_where_nobody_listens_is_a_lost_ping_at_once() -> None:
    with open_socket("127.0.0.1") as sock:
        port = sock.getsockname()[1]
    began_s = time.monotonic()
    assert list(pings("127.0.0.1", port, TOKEN, CLIENT, Clock(), range(3), 2.0)) == [None] * 3
    assert time.monotonic() - began_s < 2.0


def test_no_address_of_its_own_is_an_error() -> None:
    with pytest.raises(OSError) as caught:
        Responder(["203.0.113.1"], TOKEN, Clock(), lambda _: 0, lambda: 0)
    assert caught.value.errno == errno.EADDRNOTAVAIL


def test_ipv6_is_served_too() -> None:
    try:
        open_socket("::1").close()
    except OSError as error:
        pytest.skip(f"no IPv6 here: {error.strerror}")
    served = Responder(["127.0.0.1", "::1"], TOKEN, Clock(), lambda _: 0, lambda: 0)
    thread = threading.Thread(target=served.serve, args=(5,))
    thread.start()
    try:
        for address in served.addresses:
            assert next(pings(address, served.port, TOKEN, CLIENT, Clock(), [1], 1.0)) is not None
        assert len(served.addresses) == 2
    finally:
        served.wake()
        thread.join(5)
        served.close()


class _Stepping(Clock):
    """A clock that is set while a ping is on its way."""

    def __init__(self, step_ns: int) -> None:
        self._readings, self._step_ns = 0, step_ns

    def real_ns(self) -> int:
        self._readings += 1
        return super().real_ns() + (self._step_ns if self._readings > 1 else 0)

    def of_kernel(self, stamp_ns: int) -> int:
        return stamp_ns + self._step_ns


def test_a_ping_during_which_the_clock_was_set_forward_is_lost() -> None:
    with responder() as served:
        (found,) = pings("127.0.0.1", served.port, TOKEN, CLIENT, _Stepping(10**9), [1], 1.0)
        assert found is None
        (found,) = pings("127.0.0.1", served.port, TOKEN, CLIENT, _Stepping(-(10**9)), [1], 1.0)
        assert found is not None
        assert found.round_trip_ns < 0, "set back: told by its round trip, and left out of the measurement"


def test_a_stamp_of_another_clock_is_not_believed() -> None:
    class Elsewhere(Clock):
        def of_kernel(self, stamp_ns: int) -> int:
            return stamp_ns - 3_600_000_000_000

    with open_socket("127.0.0.1") as sock, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        sender.sendto(b"x", sock.getsockname())
        sock.settimeout(1)
        data, _, received_ns, by_kernel = receive(sock, Elsewhere())
    assert (data, by_kernel) == (b"x", False)
    assert abs(received_ns - time.time_ns()) < 10**9
