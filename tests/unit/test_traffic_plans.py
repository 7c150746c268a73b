"""Plans from Python: what they hold, their files and tables, and one sentence for each wrong call."""

from pathlib import Path

import pytest

import ringtap
from ringtap.core.errors import UsageError
from ringtap.core.flow_plan_file import PlanFile
from ringtap.core.flow_plan_format import Flow
from ringtap.trafficgen.plans.common import PlanOutline
from ringtap.trafficgen.plans.registry import traffic_kinds
from tests.unit.traffic_processes import MS, plan_of, traffic

pytestmark = [pytest.mark.computes, pytest.mark.long]

NODES = ["10.0.0.1:5001", "10.0.0.2:5001", "10.0.0.3:5001"]
LOAD = {"load": "1gbit", "duration": "100ms"}
KINDS = {
    "consistent": LOAD,
    "burst": LOAD | {"burst_length": 0.002, "burst_height": 2},
    "long-lived": {"duration": 1, "flows": 3},
    "on-off": LOAD,
    "incast": {"duration": "20ms", "size": "64kB", "flows": 4},
    "all-to-all": {"duration": "20ms", "size": 64_000, "node": NODES},
    "ring": {"duration": 1.0, "bytes": "1MB", "iterations": 2, "compute": "1ms", "node": NODES},
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_holds_the_flows_of_the_command(kind: str, tmp_path: Path) -> None:
    options = KINDS[kind] | ({} if "node" in KINDS[kind] else {"to": "127.0.0.1:5001"})
    ringtap.FlowPlan(kind, **options).write(tmp_path / "python.plan")
    words: list[object] = []
    for key, value in options.items():
        for one in value if isinstance(value, list) else [value]:
            unit = "s" if key in ("duration", "burst_length") and not isinstance(one, str) else ""
            words += [f"--{key.replace('_', '-')}", f"{one}{'B' if key == 'size' and isinstance(one, int) else unit}"]
    traffic("plan", "--kind", kind, *words, "-o", tmp_path / "command.plan")
    assert (tmp_path / "python.plan").read_text() == (tmp_path / "command.plan").read_text()


def test_lists_and_replays_come_from_files(tmp_path: Path) -> None:
    (tmp_path / "list.txt").write_text("1\n0 1 3 5001 1000 0.5\n")
    listed = ringtap.FlowPlan("list", list=tmp_path / "list.txt", node=NODES[:2])
    assert (listed.flows, listed.size_bytes, listed.destinations) == (1, 1000, NODES[:2])
    pytest.importorskip("numba")
    shipped = Path(__file__).resolve().parents[2] / "examples" / "ring.pcap.gz"
    assert ringtap.FlowPlan("replay", replay=str(shipped), to="127.0.0.1:5001").flows > 10


def test_numbers_and_texts_are_alike() -> None:
    texts = ringtap.FlowPlan("consistent", load="20mbit", duration="500ms", scale="100", seed="2")
    numbers = ringtap.FlowPlan("consistent", load=20e6, duration=0.5, scale=100, seed=2)
    assert texts.to_frame().equals(numbers.to_frame())
    assert repr(texts) == f"<FlowPlan consistent: {texts.flows} flows in 500 ms, 20 Mbit/s of payload>"
    assert (texts.kind, texts.duration_s, texts.size_bytes, texts.destinations) == ("consistent", 0.5, 1_250_000, [])


def test_the_table_has_a_row_per_flow_and_units() -> None:
    table = ringtap.FlowPlan("ring", **KINDS["ring"]).to_frame()
    assert list(table) == ["flow", "start_s", "source", "destination", "size_bytes", "after", "delay_s"]
    assert table["flow"].tolist() == list(range(2 * 4 * 3))
    assert table["source"].unique().tolist() == ["10.0.0.1", "10.0.0.2", "10.0.0.3"]
    assert table["size_bytes"].sum() == 2 * 4 * 1_000_000
    assert table["after"].isna().sum() == table["delay_s"].isna().sum() == 3
    assert table["delay_s"].max() == 0.001
    assert table.attrs["units"] == {"start_s": "s", "size_bytes": "bytes", "delay_s": "s"}
    assert set(table.attrs["columns"]) == set(table)


def test_receivers_are_the_second_argument_too() -> None:
    given = ringtap.FlowPlan("consistent", "127.0.0.1:5001", **LOAD)
    assert given.destinations == ["127.0.0.1:5001"]
    assert given.to_frame().equals(ringtap.FlowPlan("consistent", to="127.0.0.1:5001", **LOAD).to_frame())


def test_what_is_unknown_is_na_and_never_0() -> None:
    plan = ringtap.FlowPlan("long-lived", duration=1, flows=2)
    assert plan.size_bytes is None
    table = plan.to_frame()
    assert table[["source", "destination", "size_bytes", "after", "delay_s"]].isna().all(axis=None)
    assert table["start_s"].tolist() == [0, 0]


def test_a_plan_is_written_and_read(tmp_path: Path) -> None:
    plan = ringtap.FlowPlan("consistent", **LOAD, to=("127.0.0.1", 5001), from_="127.0.0.1")
    path = plan.write(str(tmp_path / "x.plan"))
    assert path == tmp_path / "x.plan"
    read = ringtap.FlowPlan.read(str(path))
    assert read.to_frame().equals(plan.to_frame())
    assert repr(read) == repr(plan)
    assert repr(read).endswith(", to 127.0.0.1:5001>")
    read.write(tmp_path / "y.plan")
    assert list(PlanFile(tmp_path / "y.plan").flows()) == list(PlanFile(path).flows())
    with pytest.raises(UsageError, match=r"x.plan exists: name another file or add force"):
        plan.write(path)
    plan.write(path, force=True)


def test_a_plan_without_receivers_goes_where_it_is_sent() -> None:
    plan = ringtap.FlowPlan("consistent", **LOAD)
    assert {flow.destination for flow in plan.sent_to(["a:1", "b:2"]).flows()} == {"a:1", "b:2"}
    with pytest.raises(UsageError, match="names no receiver: give to="):
        plan.sent_to([])
    with pytest.raises(UsageError, match="names no receiver for its file: give to="):
        plan.write("x.plan")


def test_the_receivers_of_a_file_are_replaced_one_by_one(tmp_path: Path) -> None:
    flows = [Flow(0, "", "a:1", 10), Flow(1, "", "b:2", 20)]
    plan = ringtap.FlowPlan.read(plan_of(tmp_path / "x.plan", flows, MS))
    assert plan.sent_to([]).header["destinations"] == ["a:1", "b:2"]
    assert [flow.destination for flow in plan.sent_to(["c:3", "d:4"]).flows()] == ["c:3", "d:4"]
    with pytest.raises(UsageError, match=r"x\.plan has 2 receivers and to= 1: name as many"):
        plan.sent_to(["c:3"])


@pytest.mark.parametrize(
    ("kind", "options", "sentence"),
    [
        ("consistant", LOAD, "'consistant' is not a kind of traffic: did you mean 'consistent'?"),
        (3, LOAD, "3 is not a kind of traffic: it is one of consistent, burst,"),
        ("consistent", LOAD | {"duratoin": 1}, "consistent traffic has no 'duratoin': did you mean 'duration'?"),
        ("consistent", LOAD | {"zzz": 1}, "consistent traffic has no 'zzz': it takes load, duration,"),
        ("consistent", LOAD | {"burst_length": 1}, "has no 'burst_length'"),
        ("consistent", {"duration": 1}, "kind consistent needs load"),
        ("consistent", LOAD | {"load": "10gbitt"}, "load '10gbitt' is not understood: did you mean 10gbit?"),
        ("consistent", LOAD | {"load": -1}, "load -1 bit/s is not usable"),
        ("consistent", LOAD | {"load": float("nan")}, "load nan is not usable"),
        ("consistent", LOAD | {"load": [1]}, r"load \[1\] is not usable: give a number or text"),
        ("consistent", LOAD | {"load": True}, "load True is not usable"),
        ("consistent", LOAD | {"duration": "10parsecs"}, "duration '10parsecs' is not understood"),
        ("consistent", LOAD | {"duration": -1}, "duration -1000000000 ns is not usable"),
        ("consistent", LOAD | {"mtu": "big"}, "mtu 'big' is not usable: largest IP packet"),
        ("consistent", LOAD | {"load_counts": "wires"}, "load_counts 'wires' is unknown: did you mean 'wire'?"),
        ("consistent", LOAD | {"to": "here"}, "'here' is not an address: write HOST:PORT"),
        ("consistent", LOAD | {"to": 5001}, "5001 is neither a text nor a list"),
        ("consistent", LOAD | {"to": []}, "to= is an empty list"),
        ("consistent", LOAD | {"sizes": "websearch"}, "unknown"),
        ("burst", LOAD | {"burst_length": 1}, "change burst_length or burst_period"),
        ("incast", LOAD | {"to": ["a:1", "b:1"]}, "incast goes to one destination: give to once"),
        ("replay", {"replay": "missing.rec"}, "missing.rec"),
    ],
)
def test_a_wrong_call_is_one_sentence(kind: str, options: dict[str, object], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence) as caught:
        ringtap.FlowPlan(kind, **options)
    assert "--" not in str(caught.value)


def test_a_wrong_file_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        ringtap.FlowPlan.read(tmp_path / "missing.plan")
    (tmp_path / "x.plan").write_text("no plan\n")
    with pytest.raises(UsageError, match="is not a flow plan"):
        ringtap.FlowPlan.read(tmp_path / "x.plan")


def test_one_text_for_a_list_of_destinations_is_one_sentence() -> None:
    with pytest.raises(UsageError, match=r"destinations '127.0.0.1:5001' is one text: give a list"):
        PlanOutline(10**9, "127.0.0.1:5001").check()


def test_the_docstring_names_every_kind() -> None:
    assert all(f"``{kind}``" in (ringtap.FlowPlan.__doc__ or "") for kind in traffic_kinds())
