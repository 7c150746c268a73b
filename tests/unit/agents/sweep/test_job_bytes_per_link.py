"""Payload of links by counters: pauses, retransmission and wraps, with made-up counters."""

from collections.abc import Sequence

import pytest

from ringtap.agents.sweep.job_bytes_per_link import LinkPayload
from ringtap.agents.testbed.topology import LinkCount

pytestmark = pytest.mark.shares

MS = 1_000_000
PERIOD, PAUSE, FRAME, HEADER = 100 * MS, 30 * MS, 1514, 66
ENDS = [(number * PERIOD - MS, number * PERIOD) for number in range(1, 30)]
PACKETS_BITS = 32


def payload(samples: Sequence[Sequence[LinkCount]]) -> dict[str, object]:
    found = LinkPayload(lambda: [], ["S0 up", "S0 down"], PAUSE / 1e9)
    found._samples = list(samples)
    return found.per_iteration(ENDS)


def counts(t_ns: int, first_packets: int = 0) -> list[LinkCount]:
    """An iteration sends 40 frames up and as many acknowledgements down, from 30 to 100 ms after its begin."""
    done, within = divmod(t_ns, PERIOD)
    packets = 40 * done + round(40 * max(0, within - PAUSE) / (PERIOD - PAUSE))
    return [LinkCount(t_ns, t_ns + 1000, size * packets, (first_packets + packets) % 2**PACKETS_BITS)
            for size in (FRAME, HEADER)]  # fmt: skip


@pytest.mark.parametrize("first_packets", [0, 2**32 - 100])
def test_samples_in_pauses_give_the_payload_of_whole_iterations(first_packets: int) -> None:
    times = [number * 17 * MS + 200 * MS for number in range(15)] + [
        number * 17 * MS + 2000 * MS for number in range(15)
    ]
    found = payload([counts(t_ns, first_packets) for t_ns in times])
    assert found["link_payload_bytes"] == {"S0 up": 40 * (FRAME - HEADER), "S0 down": 0}
    iterations = found["link_iterations"]
    assert isinstance(iterations, int)
    assert iterations >= 18


def test_links_of_a_bundle_are_summed_up() -> None:
    found = LinkPayload(lambda: [], ["all", "all"], PAUSE / 1e9)
    found._samples = [counts(t_ns) for t_ns in (205 * MS, 705 * MS)]
    assert found.per_iteration(ENDS) == {"link_payload_bytes": {"all": 40 * (FRAME - HEADER)}, "link_iterations": 5}
    assert "link_why" in found.per_iteration(ENDS)  # the samples are used up


@pytest.mark.parametrize(
    "times", [[], [250 * MS], [205 * MS, 215 * MS], [205 * MS, 760 * MS], [229_999_500, 629_999_500]]
)
def test_without_two_pauses_there_is_a_reason(times: list[int]) -> None:
    """In no pause, in one only, in one and beside another, and across the ends of both."""
    assert "were not read in the pauses" in str(payload([counts(t_ns) for t_ns in times])["link_why"])


def test_a_reset_counter_is_no_payload() -> None:
    after = [one._replace(size_bytes=0) for one in counts(605 * MS)]
    assert payload([counts(205 * MS), after]) == {"link_why": "a counter of S0 up was reset"}
