"""Profiles of recorded jobs whose counters wrap, are reset or have gaps."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from ringtap.core.append_only_logs import RecordWriter, open_records
from ringtap.core.errors import UsageError
from ringtap.workload.demand_of_recorded_job import recorded_job
from tests.gold.shared_jobs import ITERATIONS, MS, RATE_BPS, START_NS, job

pytestmark = pytest.mark.computes

Change = Callable[[int, int], int | None]  # from the number of a sample and a count to the count; None: no sample


def wraps(_: int, count: int) -> int:
    return (count + 2**32 - 20_000_000) % 2**32


def is_reset(number: int, count: int) -> int:
    """Return what is counted since 2 s after the start, when 16,513 packets had been sent."""
    before = 16_513 * (1514 if count > 10**6 else 1)
    return count if number < 300 else max(0, count - before)


def has_gap(number: int, count: int) -> int | None:
    return None if 200 <= number < 350 else count


def is_reset_in_a_gap(number: int, count: int) -> int | None:
    return has_gap(number, is_reset(number, count))


def recorded(path: Path, change: Change, width_bits: int) -> Path:
    """Write a job of 40 iterations of 100 ms, sampled every 10 ms, with other counters at its first host."""
    job(path, [START_NS + 100 * MS * number for number in range(ITERATIONS)], [0] * ITERATIONS)
    log = path / "nodes" / "S0" / "nic" / "nic.rec"
    file = open_records(log)
    rows = file.tail()
    log.unlink()
    kinds = [one.kind == "counter" for one in file.fields]
    fields = [replace(one, width_bits=width_bits * counts) for one, counts in zip(file.fields, kinds, strict=True)]
    writer = RecordWriter(log, fields, dict(file.about))
    for number, row in enumerate(rows):
        values = [change(number, value) if counts else value for value, counts in zip(row, kinds, strict=True)]
        if None not in values:
            writer.append(*(value for value in values if value is not None))
    writer.close()
    return path


@pytest.mark.parametrize(
    ("change", "width_bits"), [(wraps, 32), (is_reset, 64), (has_gap, 64), (is_reset_in_a_gap, 64)]
)
def test_only_iterations_whose_bytes_are_known_make_the_profile(
    change: Change, width_bits: int, tmp_path: Path
) -> None:
    rates_bps = recorded_job(recorded(tmp_path / "run", change, width_bits), "a").rates_bps(10)
    assert rates_bps[5:8] == pytest.approx([RATE_BPS] * 3, rel=0.03)
    assert rates_bps[:3] == pytest.approx([0] * 3, abs=0.01 * RATE_BPS)
    assert sum(rates_bps) / 10 == pytest.approx(RATE_BPS / 2, rel=0.03)


def test_too_few_known_iterations_are_refused_with_the_reason(tmp_path: Path) -> None:
    path = recorded(tmp_path / "run", lambda number, count: None if 150 <= number < 450 else count, 64)
    with pytest.raises(UsageError, match="cover 4 iterations without a reset or a gap, 10 needed"):
        recorded_job(path, "a")
