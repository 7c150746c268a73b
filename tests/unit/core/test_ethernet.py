"""Interface counters against what a wire carries."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringtap.core.ethernet import (
    ETHERNET_MTU,
    IPV4,
    IPV6,
    family_of,
    frame_bytes,
    headers_bytes,
    payload_share,
    segment_bytes,
)

pytestmark = pytest.mark.computes

MSS, HEADER_BYTES = 1448, 66


@pytest.mark.parametrize(
    ("address", "family", "headers", "segment"),
    [("192.0.2.1", IPV4, 66, 1448), ("::ffff:192.0.2.1", IPV4, 66, 1448), ("2001:db8::1", IPV6, 86, 1428)],
)
def test_headers_are_those_of_the_family(address: str, family: int, headers: int, segment: int) -> None:
    assert family_of(address) == family
    assert (headers_bytes(family), segment_bytes(1500, family)) == (headers, segment)


@given(segments=st.lists(st.integers(1, 44), min_size=1, max_size=200))
def test_full_segments_are_counted_exactly(segments: list[int]) -> None:
    """Pieces of n full segments have one header in the counter, n on the wire."""
    counted = sum(HEADER_BYTES + n * MSS for n in segments)
    wire = sum(n * (HEADER_BYTES + MSS) for n in segments)
    assert abs(frame_bytes(counted, len(segments), 1500) - wire) < 1e-6 * wire


@given(sizes=st.lists(st.integers(0, MSS), min_size=1, max_size=200))
def test_single_segments_are_left_alone(sizes: list[int]) -> None:
    counted = sum(HEADER_BYTES + size for size in sizes)
    assert frame_bytes(counted, len(sizes), 1500) == counted


def test_bulk_traffic_over_ipv6_is_at_most_1_4_percent_low() -> None:
    wire, counted = 44 * (86 + 1428), 86 + 44 * 1428
    assert frame_bytes(counted, 1, 1500) / wire == pytest.approx(1 - 0.014, abs=0.001)


def test_a_flow_misses_one_header_at_most() -> None:
    for payload in range(1, 100_000, 777):
        whole, rest = divmod(payload, 4 * MSS)
        pieces = whole + (rest > 0)
        wire = payload + -(-payload // MSS) * HEADER_BYTES
        assert 0 <= wire - frame_bytes(payload + pieces * HEADER_BYTES, pieces, 1500) <= HEADER_BYTES


@given(st.integers(576, 9000))
def test_the_payload_share_is_that_of_full_frames(mtu: int) -> None:
    payload = 1000 * (mtu - 52)
    assert payload / payload_share(mtu) == pytest.approx(frame_bytes(payload, 0, mtu))
    assert payload_share(ETHERNET_MTU) == 1448 / 1514
