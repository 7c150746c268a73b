"""Interface counters against what a wire carries."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringtap.core.ethernet import HEADER_BYTES, frame_bytes

pytestmark = pytest.mark.computes

MSS = 1448


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


def test_a_flow_misses_one_header_at_most() -> None:
    for payload in range(1, 100_000, 777):
        whole, rest = divmod(payload, 4 * MSS)
        pieces = whole + (rest > 0)
        wire = payload + -(-payload // MSS) * HEADER_BYTES
        assert 0 <= wire - frame_bytes(payload + pieces * HEADER_BYTES, pieces, 1500) <= HEADER_BYTES
