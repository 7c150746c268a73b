"""Logs of senders: one reader for replays, baselines and comparisons, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ringtap.analysis.traffic.flow_logs import read_sent
from ringtap.core.append_only_logs import Field, RecordWriter
from ringtap.core.errors import UsageError
from ringtap.core.run_directory_schema import FLOW_STATES
from ringtap.core.sent_flow_log import FIELDS, NO_SOURCE, SentFlow, open_sent_log, slowdown
from ringtap.trafficgen.plans.registry import make_plan
from ringtap.trafficgen.statistics import congestion_impact

pytestmark = pytest.mark.computes

ABOUT = {"source": "sender", "origin_ns": 1000, "destinations": ["a:1"], "sources": ["10.0.0.9"]}
FLOW = SentFlow(3, 1001, 1002, 1003, 1500, 1490, 1, 700, 700, 700, 2, 60, 50, FLOW_STATES["finished"], NO_SOURCE, 0)


def write(path: Path, *flows: SentFlow, fields: tuple[Field, ...] = FIELDS, **about: Any) -> Path:
    writer = RecordWriter(path, fields, ABOUT | about)
    writer.append_many([[getattr(flow, field.name) for field in fields] for flow in flows])
    writer.close()
    return path


def test_a_flow_has_the_columns_of_the_log(tmp_path: Path) -> None:
    assert SentFlow._fields == tuple(field.name for field in FIELDS)
    log = open_sent_log(write(tmp_path / "s.rec", FLOW))
    assert (log.origin_ns, log.sources, log.destinations) == (1000, ["10.0.0.9"], ["a:1"])
    assert list(log.flows()) == [FLOW]


def test_a_log_of_an_older_version_has_no_smallest_round_trip_times_and_no_sources(tmp_path: Path) -> None:
    older = tuple(field for field in FIELDS if field.name not in ("received_ns", "min_rtt_us", "source"))
    path = write(tmp_path / "s.rec", FLOW, fields=older)
    assert list(open_sent_log(path).flows()) == [FLOW._replace(received_ns=0, min_rtt_us=0)]
    assert read_sent([path]).min_rtt_us.tolist() == [0]


@pytest.mark.parametrize(
    "change",
    [{"state": FLOW_STATES["unfinished"]}, {"start_ns": 0}, {"finish_ns": 0}, {"size_bytes": 0}],
)
def test_only_finished_flows_with_a_size_have_a_completion_time(change: dict[str, int], tmp_path: Path) -> None:
    flows = [FLOW, FLOW._replace(**change)]
    assert [flow.completion_ns for flow in flows] == [498, None]
    assert read_sent([write(tmp_path / "s.rec", *flows)]).completion_ns.tolist() == [498]
    assert congestion_impact(tmp_path / "s.rec").fct_mean_s == pytest.approx(498e-9)


@pytest.mark.parametrize(
    ("change", "about", "words"),
    [
        ({}, {"source": "receiver"}, "is not a log of 'ringtap traffic send'"),
        ({}, {"origin_ns": None}, "is not a log of 'ringtap traffic send'"),
        ({}, {"destinations": None}, "is not a log of 'ringtap traffic send'"),
        ({"destination": 1}, {}, "is damaged: it names destination 1"),
        ({"source": 1}, {}, "is damaged: it names source 1"),
    ],
)
def test_every_reader_refuses_the_same_logs(
    change: dict[str, int], about: dict[str, Any], words: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "s.rec", FLOW._replace(**change), **about)
    for read in (
        lambda: read_sent([path]),
        lambda: congestion_impact(path),
        lambda: make_plan("replay", {"replay": path}),
    ):
        with pytest.raises(UsageError, match=words):
            read()


def test_a_column_that_is_missing_or_no_number_is_named(tmp_path: Path) -> None:
    fewer = tuple(field for field in FIELDS if field.name != "acked_bytes")
    with pytest.raises(UsageError, match="has no acked_bytes: an older ringtap wrote it"):
        open_sent_log(write(tmp_path / "s.rec", FLOW, fields=fewer))
    floats = tuple(Field(field.name, "<f8", "", "gauge") if field.name == "rtt_us" else field for field in FIELDS)
    with pytest.raises(UsageError, match="its rtt_us is not a whole number"):
        open_sent_log(write(tmp_path / "t.rec", FLOW, fields=floats))


def test_a_slowdown_of_1_is_the_round_trip_and_the_bytes_at_the_line_rate() -> None:
    assert slowdown(50_000 + 8_000, 1000, 50, 1e9) == 1
