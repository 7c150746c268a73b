"""Plans over random loads, durations, scales and burst shapes: bytes are exact, starts in order."""

from __future__ import annotations

import json
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from ringtap.core.errors import UsageError
from ringtap.core.flow_plan_file import PlanFile, write_plan
from ringtap.core.flow_plan_format import FORMAT
from ringtap.core.flow_plan_table import read_plan
from ringtap.trafficgen.plans.registry import make_plan
from ringtap.trafficgen.plans.sending_requirements import requirements
from tests.unit.web_plans import PlanSpec, web_plan

pytestmark = [pytest.mark.computes, pytest.mark.long]

MS = 1_000_000
TO = ("a:1", "b:2")
seeds = st.integers(0, 2**64)
scales = st.floats(0.5, 1000)


@given(load=st.integers(1, 10**9), duration_ns=st.integers(1, 3_000 * MS), seed=seeds, scale=scales)
@settings(max_examples=60, deadline=None)
def test_consistent_bytes_are_exact(load: int, duration_ns: int, seed: int, scale: float) -> None:
    asked = round(Fraction(load * duration_ns, 8 * 10**9))
    assume(1 <= asked < 2_000 * 1_711_250 / scale)
    plan = web_plan(PlanSpec("consistent", load, duration_ns, TO, seed, scale))
    flows = list(plan.flows())
    assert sum(flow.size_bytes for flow in flows) == asked == plan.header["bytes"]
    assert len(flows) == plan.header["flows"] == max(1, int(asked / (1_711_250 / scale)))
    assert all(flow.size_bytes >= 1 for flow in flows)
    starts = [flow.start_ns for flow in flows]
    assert starts == sorted(starts)
    assert starts[0] >= 0
    assert starts[-1] < duration_ns


@given(
    load=st.integers(10**6, 10**10),
    periods=st.integers(1, 30),
    period_ns=st.integers(MS, 50 * MS),
    length=st.fractions(Fraction(1, 100), Fraction(9, 10), max_denominator=100),
    fill=st.floats(0.05, 0.95),
    quiet=st.sampled_from(["each", "together"]),
    seed=seeds,
    scale=scales,
)
@settings(max_examples=60, deadline=None)
def test_every_burst_and_quiet_part_has_its_budget_to_the_byte(
    *,
    load: int,
    periods: int,
    period_ns: int,
    length: Fraction,
    fill: float,
    quiet: Literal["each", "together"],
    seed: int,
    scale: float,
) -> None:
    length_ns = int(period_ns * length)
    height = fill * period_ns / length_ns
    spec = PlanSpec("burst", load, periods * period_ns, TO, seed, scale, height, length_ns, period_ns, quiet)
    assume(load * spec.duration_ns / 8e9 < 3_000 * 1_711_250 / scale)
    try:
        plan = web_plan(spec)
    except UsageError:
        assert load * period_ns / 8e9 * min(fill, 1 - fill) < 20
        return
    got = [[0, 0, 0] for _ in range(periods)]
    for flow in plan.flows():
        period, within = divmod(flow.start_ns, period_ns)
        got[period][within >= length_ns] += flow.size_bytes
        got[period][2] += within < length_ns
    done = spare = 0
    for number, (burst, rest, burst_flows) in enumerate(got, start=1):
        upto = round(Fraction(load * number * period_ns, 8 * 10**9))
        budget, done = upto - done, upto
        assert burst == round(budget * Fraction(repr(height)) * length_ns / period_ns)
        spare += budget - burst - rest
        assert burst_flows == 2
        assert spare == 0 or quiet == "together"
    assert spare == 0


@given(
    kind=st.sampled_from(["consistent", "on-off", "incast"]),
    load=st.integers(10**5, 10**10),
    duration_ns=st.integers(MS, 3_000 * MS),
    counts=st.sampled_from(["payload", "wire"]),
    mtu=st.integers(576, 9000),
    seed=seeds,
)
@settings(max_examples=80, deadline=None)
def test_every_kind_has_its_budget_to_the_byte(
    *, kind: str, load: int, duration_ns: int, counts: str, mtu: int, seed: int
) -> None:
    given_ = {"load": load, "load_counts": counts, "duration": duration_ns, "to": list(TO[:1]), "seed": seed}
    share = Fraction(mtu - 52, mtu + 38) if counts == "wire" else 1
    asked = round(Fraction(load * duration_ns, 8 * 10**9) * share)
    try:
        plan = make_plan(kind, given_ | ({"mtu": mtu} if counts == "wire" else {}))
    except UsageError:
        # A round, or an on period, gets no byte
        assert kind != "consistent" or asked < 1
        assert asked < 8 * duration_ns / (10 * MS) + 8 or duration_ns % (10 * MS) * load < 16 * 8e9
        return
    flows = list(plan.flows())
    assert sum(flow.size_bytes for flow in flows) == plan.header["bytes"] == asked
    assert len(flows) == plan.header["flows"]
    assert min(flow.size_bytes for flow in flows) >= 1
    starts = [flow.start_ns for flow in flows]
    assert starts == sorted(starts)
    assert 0 <= starts[0] <= starts[-1] < duration_ns


ring_nodes = [f"10.0.0.{node}:1" for node in range(1, 9)]


@given(
    count=st.integers(2, 8), iterations=st.integers(1, 5), size_bytes=st.integers(8, 10**9), compute=st.integers(0, MS)
)
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_rings_are_read_back_with_who_waits_for_whom(
    *, count: int, iterations: int, size_bytes: int, compute: int, tmp_path: Path
) -> None:
    given_ = {"node": ring_nodes[:count], "iterations": iterations, "bytes": size_bytes, "compute": compute}
    plan = make_plan("ring", given_ | {"duration": 10 * MS})
    write_plan(plan, tmp_path / "plan", force=True)
    read = PlanFile(tmp_path / "plan")
    needs = requirements(read)
    assert needs.dependent
    assert needs.bytes == iterations * 2 * (count - 1) * size_bytes
    assert len(needs.most_at_once) == count
    assert list(read.flows()) == list(plan.flows())


@given(kind=st.sampled_from(["consistent", "burst"]), load=st.integers(10**6, 10**9), seed=seeds)
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_is_written_is_read_back(kind: str, load: int, seed: int, tmp_path: Path) -> None:
    plan = web_plan(PlanSpec(kind, load, 50 * MS, TO, seed, 100))  # type: ignore[arg-type]
    write_plan(plan, tmp_path / "plan", force=True)
    read = PlanFile(tmp_path / "plan")
    assert list(read.flows()) == list(plan.flows())
    assert read.header == plan.header


@example(junk=["\ud800"])  # bytes that are not UTF-8
@given(junk=st.lists(st.text(alphabet=st.characters(exclude_characters="\n\r"), max_size=30), max_size=5))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_junk_lines_are_one_sentence_that_names_the_line(junk: list[str], tmp_path: Path) -> None:
    path = tmp_path / "plan"
    write_plan(web_plan(PlanSpec("burst", 10**7, 10 * MS, TO, 1, 100)), path, force=True)
    whole = path.read_text(encoding="utf-8")
    path.write_bytes((whole + "".join(line + "\n" for line in junk)).encode("utf-8", "surrogatepass"))
    try:
        list(PlanFile(path).flows())
    except UsageError as error:
        assert f"{path} line {whole.count(chr(10)) + 1}: " in str(error)
    else:
        assert not junk


lines = [f"0\t-\t{TO[0]}\t10\t-", f"5\t10.0.0.9\t{TO[1]}\t7\t0+3", f"5\t-\t{TO[0]}\t0\t0,1+9", f"9\t-\t{TO[1]}\t20\t1"]
header = {"format": FORMAT, "version": 3, "duration_ns": 10, "flows": 4, "bytes": 37, "sources": ["10.0.0.9"]}
whole_plan = "\n".join([json.dumps(header | {"destinations": TO}), *lines, ""])


@given(
    edits=st.lists(
        st.tuples(st.integers(0, len(whole_plan)), st.integers(0, 3), st.text("0123456789-+,._ \t\n٣", max_size=3)),
        max_size=2,
    )
)
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_is_simulated_and_compared_is_what_is_sent(edits: list[tuple[int, int, str]], tmp_path: Path) -> None:
    text, path = whole_plan, tmp_path / "plan"
    for at, removed, added in edits:
        text = text[:at] + added + text[at + removed :]
    path.write_text(text, encoding="utf-8")

    def verdict(read: Callable[[Path], Any]) -> tuple[Any, str]:
        try:
            return read(path), ""
        except UsageError as error:
            return None, str(error)

    sent, why = verdict(lambda path: list(PlanFile(path).flows()))
    table, table_why = verdict(read_plan)
    assert table_why == why
    if sent is not None:
        assert table.start_ns.tolist() == [flow.start_ns for flow in sent]
        assert table.after.tolist() == [earlier for flow in sent for earlier, _ in flow.after]
