"""Runs compared: known differences with their sizes, none where there is none, and reasons for what is not known."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import ringtap
from ringtap.analysis.compare.comparison_text import chance, describe
from ringtap.analysis.compare.run_comparison import compare_measures, compare_runs
from ringtap.analysis.compare.run_measures import LOADED, MEDIAN, Measure, RunMeasures
from ringtap.analysis.statistics.two_sample import location_p
from ringtap.cli import main
from ringtap.core.append_only_logs import open_records
from ringtap.core.errors import UsageError
from ringtap.core.run_directory import RunDirectory
from tests.gold.analysis_sweep import CURVES, write_sweep
from tests.gold.clocks_apart import retime_windows, set_ahead
from tests.gold.job_run import MS, START_NS, Node, Truth, pcap, write_ddp_job

pytestmark = [pytest.mark.computes, pytest.mark.long, pytest.mark.together]

SMALL = Truth()
LARGE = Truth(iteration_ms=300, compute_ms=(100, 130), network_ms=60, gradient_bytes=8_000_000)


def run_of(label, times_s):
    times = np.asarray(times_s)
    median = Measure(MEDIAN, "iteration, median", "s", float(np.median(times)), samples=times)
    return RunMeasures(label, Path(label), {}, times, {MEDIAN: median}, pd.DataFrame(), "not recorded")


def row_of(found, name):
    return next(row for row in found.rows if row.name == name)


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("jobs")
    for name, truth in (("small", SMALL), ("large", LARGE)):
        write_ddp_job(folder / name, truth)
    return folder / "small", folder / "large"


@pytest.fixture(scope="module")
def found(jobs):
    return ringtap.compare_runs(jobs)


@pytest.mark.parametrize("memory", [0.0, 0.5])
def test_equal_runs_differ_no_more_often_than_chance_allows(memory):
    draw, count, pairs = np.random.default_rng(16), 120, 200
    alarms = 0
    for _ in range(pairs):
        noise = draw.normal(0, 0.05, (2, count))
        for at in range(1, count):
            noise[:, at] += memory * noise[:, at - 1]
        row = row_of(
            compare_measures([run_of("a", 0.2 * np.exp(noise[0])), run_of("b", 0.2 * np.exp(noise[1]))]), MEDIAN
        )
        alarms += bool(row.is_beyond_chance)
    # 10 are expected; of a binomial variable of 200 at 5 %, 19 or more are 1 in 200
    assert 1 <= alarms <= 19


def test_a_doubled_iteration_time_is_found_with_its_ratio():
    draw = np.random.default_rng(3)
    times = [0.2 * np.exp(draw.normal(0, 0.05, 100)), 0.4 * np.exp(draw.normal(0, 0.05, 100))]
    found = compare_measures([run_of("slow", times[1]), run_of("fast", times[0])])
    first, second = found.answer
    assert first == f"fast has the shortest iteration: {np.median(times[0]) * 1e3:.3g} ms in the median."
    ratio, low, high = map(float, re.findall(r"\d\.\d+", second)[:3])
    assert second.startswith("slow takes ")
    assert second.endswith("beyond chance (p < 0.001).")
    assert ratio == pytest.approx(np.median(times[1]) / np.median(times[0]), rel=1e-3)
    assert low < 2 < high
    assert high - low < 0.2


def test_of_three_runs_the_equal_ones_share_the_first_place():
    draw = np.random.default_rng(4)
    runs = [run_of(name, at * np.exp(draw.normal(0, 0.05, 60))) for name, at in (("a", 0.3), ("b", 0.2), ("c", 0.2))]
    answer = compare_measures(runs).answer
    assert re.match(
        r"No difference beyond chance between [bc] and [bc] was found: an iteration of [bc] takes ", answer[0]
    )
    assert re.match(r"[bc] takes 1.0\d+ times .* within chance \(p = .* among 3 pairs\)", answer[1])
    assert re.match(r"a takes 1.[45]\d+ times .* beyond chance", answer[2])


def test_measures_are_corrected_for_their_number_after_benjamini_and_hochberg():
    draw = np.random.default_rng(5)
    samples = [(draw.normal(size=60), draw.normal(size=60) + shift) for shift in (0.0, 0.3, 0.5, 0.7)]
    runs = [run_of(label, np.full(60, 0.2)) for label in ("a", "b")]
    for number, pair in enumerate(samples):
        for run, values in zip(runs, pair, strict=True):
            run.measures[f"m{number}"] = Measure(f"m{number}", "", "B", float(values.mean()), samples=values)
    found = compare_measures(runs)
    p = sorted((location_p(*pair), f"m{number}") for number, pair in enumerate(samples))
    least = 1.0
    for rank in (4, 3, 2, 1):  # by hand: p times their number over its rank, at most that of larger ones
        least = min(least, p[rank - 1][0] * 4 / rank)
        assert row_of(found, p[rank - 1][1]).p == pytest.approx(least)


def test_few_iterations_are_not_tested():
    found = compare_measures([run_of("a", [0.2] * 4), run_of("b", [0.4] * 50)])
    assert found.answer == (
        "a has the shortest iteration: 200 ms in the median.",
        "b takes 2 times as long as a; whether beyond chance is not known from 4 iterations of a: record 16 or more.",
    )
    row = row_of(found, MEDIAN)
    assert (row.ratio, row.p, row.is_beyond_chance) == (2.0, None, None)


def test_runs_of_15_iterations_far_apart_are_not_tested_and_16_are():
    draw = np.random.default_rng(1)
    for count, p_is_known in ((15, False), (16, True)):
        runs = [run_of(name, at * np.exp(draw.normal(0, 0.01, count))) for name, at in (("a", 0.1), ("b", 0.2))]
        found = compare_measures(runs)
        assert (row_of(found, MEDIAN).p is not None) is p_is_known
        assert found.answer[1].endswith("beyond chance (p < 0.001)." if p_is_known else "record 16 or more.")


def test_measures_of_jobs_are_those_that_were_written(found):
    value = {row.name: dict(zip(found.labels, row.values, strict=True)) for row in found.rows}
    for label, truth in (("small", SMALL), ("large", LARGE)):
        assert value[MEDIAN][label] == pytest.approx(truth.iteration_ms / 1e3)
        assert value["training_bytes"][label] == pytest.approx(2 * truth.rank_bytes, rel=1e-3)
        # of the slower rank the network alone, of the other one 30 ms of waiting more
        assert value["exposed_s"][label] == pytest.approx((truth.network_ms + 15) / 1e3)
        assert value["overlap_s"][label] == pytest.approx(0.02)
        assert value["duty_cycle"][label] == pytest.approx((truth.network_ms + 35) / truth.iteration_ms)
        assert value["fan_in"][label] == 1
        # all bytes of an iteration within its network time, which is at least a bin of about 100 ms
        assert 1.5 < value["peak_to_mean_sockets:0.1"][label] <= truth.iteration_ms / 100 * 1.01
    assert row_of(found, "training_bytes").ratio == pytest.approx(2, rel=1e-3)
    assert found.answer[1].startswith(
        "large takes 1.5 times as long as small (95 % interval 1.5 to 1.5), beyond chance"
    )


def test_interface_counters_are_given_by_host_and_direction(found):
    sent, received = row_of(found, "nic:tx"), row_of(found, "nic:rx")
    parts = [row_of(found, f"nic:n{number}:tx") for number in range(2)]
    assert sent.values == pytest.approx(tuple(map(sum, zip(*(part.values for part in parts), strict=True))))
    assert received.values == pytest.approx(sent.values, rel=0.01)
    assert all(part.is_part for part in parts)
    assert parts[0].title == "n0 NIC, sent"


def test_the_largest_differences_beyond_chance_come_first(found):
    main_rows = [row for row in found.rows if not row.is_part]
    groups = [row.order for row in found.rows]
    assert groups == sorted(groups)
    assert main_rows[0].is_beyond_chance
    assert main_rows[0].name == "exposed_s", "75 of 35 ms: more than twice"
    same = row_of(found, "compute_s")
    assert same.is_beyond_chance is False
    assert found.rows.index(same) > found.rows.index(row_of(found, MEDIAN))


def test_matrices_are_bytes_per_iteration_between_ranks(found):
    for run, truth in zip(found.runs, (SMALL, LARGE), strict=True):
        assert run.matrix.to_numpy() == pytest.approx(truth.rank_bytes * (1 - np.eye(2)), rel=1e-3)
        assert run.matrix_text == "payload between ranks per iteration"
    data = found.to_json()["runs"][0]
    assert data["matrix"]["names"] == ["0", "1"]
    assert data["matrix"]["bytes"][0][1] == pytest.approx(SMALL.rank_bytes, rel=1e-3)


def test_the_table_has_a_column_for_each_run(found):
    table = found.table
    assert list(table) == ["measure", "title", "unit", "small", "large", "ratio", "p", "beyond_chance"]
    assert set(table.attrs["columns"]) == set(table) - {"small", "large"}
    row = table.set_index("measure").loc[MEDIAN]
    assert (row["small"], row["large"], row["beyond_chance"]) == (pytest.approx(0.2), pytest.approx(0.3), True)
    assert "small has the shortest iteration" in repr(found)
    assert "<table" in found._repr_html_()


def test_what_is_unknown_has_a_reason(jobs, tmp_path):
    write_ddp_job(tmp_path / "bare", SMALL, sockets=False)
    found = compare_runs([jobs[0], tmp_path / "bare"])
    row = row_of(found, "training_bytes")
    assert row.texts[1] == "–"
    assert row.reasons == ("", "no sockets were recorded")
    text = "\n".join(describe(found))
    assert "bare has no payload of training traffic; payload of cross traffic; " in text
    assert "No run has payload of training traffic, by packets; " in text
    assert row_of(found, MEDIAN).p == 1
    assert found.answer[0].startswith("No difference beyond chance between ")


def test_a_table_that_is_wider_than_the_terminal_is_printed_in_parts(jobs):
    found = compare_runs(jobs)
    whole = describe(found)
    table = whole[whole.index("") + 1 :]
    columns = len(table[0]) - 20
    parts = describe(found, columns)
    heads = [line for line in parts if line.startswith("measure")]
    assert len(heads) > 1
    assert max(map(len, heads)) <= columns
    assert [word for head in heads for word in head.split()[1:]] == table[0].split()[1:]
    for row in found.rows:
        printed = [line for line in parts if line.startswith(f"{row.title}  ")]
        cells = [cell for line in printed for cell in re.split("  +", line)[1:]]
        (one,) = (line for line in table if line.startswith(f"{row.title}  "))
        assert cells == re.split("  +", one)[1:]


def test_a_run_shorter_than_its_sampling_period_is_called_too_short(jobs, tmp_path):
    """Sockets were recorded, and are not called missing; queues were not."""
    write_ddp_job(tmp_path / "short", Truth(iterations=6, every_ms=5000))
    found = compare_runs([jobs[0], tmp_path / "short"])
    why = "the run is too short: 4 iterations of 200 ms, and samples every 5 s"
    for name in ("training_bytes", "retransmissions"):
        assert row_of(found, name).reasons[1] == why
    text = "\n".join(describe(found))
    assert "No run has packets dropped in queues: no queues were recorded." in text
    assert "no sockets were recorded" not in text


def test_without_iterations_amounts_are_per_second(jobs, tmp_path):
    shutil.copytree(jobs[0], tmp_path / "none")
    for folder in (tmp_path / "none").glob("nodes/*/steps"):
        shutil.rmtree(folder)
    found = compare_runs([jobs[0], tmp_path / "none"])
    assert found.answer == ("No iteration of none is known: amounts per second are compared.",)
    row = row_of(found, "nic:tx")
    assert row.unit == "bit/s"
    assert row.values[0] == pytest.approx(row.values[1], rel=0.1), "the recording has some time before and after"
    assert row_of(found, MEDIAN).reasons[1] == "no whole iteration was recorded"


def test_bursts_and_incast_are_those_of_the_packets(tmp_path):
    truth = Truth(compute_ms=(100, 100, 100), offsets_ns=(0, 0, 0))
    for name, spread in (("incast", 0), ("turns", 20)):
        write_ddp_job(tmp_path / name, truth)
        packets = []
        for number in range(truth.iterations + 1):
            at = START_NS + (50 + number * truth.iteration_ms) * MS
            for part in range(10):
                for sender in (0, 1):
                    ends = ((f"10.0.0.{2 + sender}", 41_000), ("10.0.0.1", 41_001))
                    packets.append((at + (120 + spread * sender + part) * MS, *ends, 20_000))
                packets.append((at + (120 + part) * MS, ("10.0.0.3", 5001), ("10.0.0.2", 41_001), 60_000))
        pcap(tmp_path / name / "nodes/n0/packets/eth0-0.pcap", sorted(packets))
    found = compare_runs([tmp_path / "incast", tmp_path / "turns"])
    # each host sends 200 kB of each 200 ms within 10 ms; cross traffic does not count
    assert row_of(found, "peak_to_mean:0.001").values == pytest.approx((20, 20))
    assert row_of(found, "peak_to_mean:0.01").values == pytest.approx((20, 20))
    assert row_of(found, "peak_to_mean:0.1").values == pytest.approx((2, 2))
    assert row_of(found, "busy_share").values == pytest.approx((0.05, 0.1))
    assert row_of(found, "incast_largest").values == (2, 1)
    assert row_of(found, "incast_mean").values == (2, 1)


def test_ports_of_a_switch_are_listed_one_by_one(jobs, tmp_path):
    shutil.copytree(jobs[0], tmp_path / "with-switch")
    switch = Node(RunDirectory.open(tmp_path / "with-switch"), "switch")
    names = [f"to-n{port}.{way}_{what}" for port in (0, 1) for way in ("rx", "tx") for what in ("bytes", "packets")]
    rows = [(START_NS + at * 10 * MS, *(10_000 * at * (1 + (number > 3)) for number in range(8))) for at in range(430)]
    bridge = ["bridge.tx_bytes", "bridge.rx_bytes"]
    switch.wide("nic/nic.rec", dict.fromkeys([*bridge, *names], "counter"), [(r[0], 0, 0, *r[1:]) for r in rows])
    switch.finish(before={"links": {"bridge": {"below": ["to-n0", "to-n1"]}}})
    found = compare_runs([jobs[0], tmp_path / "with-switch"])
    port = row_of(found, "nic:switch:to-n1:tx")
    assert (port.title, port.values) == ("switch port to-n1, sent", (None, pytest.approx(400_000)))
    assert port.reasons[0] == "no counters of such a host or port"
    assert row_of(found, "nic:switch:tx").values[1] == pytest.approx(600_000)
    sent = row_of(found, "nic:tx").values
    assert sent[0] == pytest.approx(sent[1]), "a switch is not a host"


def test_a_sweep_is_compared_as_its_series(tmp_path, capsys):
    write_sweep(tmp_path / "sweep", [("vgg16", "consistent"), ("resnet50", "consistent")])
    assert main(["compare", str(tmp_path / "sweep"), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    rows = {row["measure"]: row["values"] for row in data["measures"]}
    sweep = ringtap.open_sweep(tmp_path / "sweep")
    assert [run["run"] for run in data["runs"]] == sweep.names
    for series in sweep:
        times = np.concatenate([point.iteration_s for point in series.alone])
        assert rows[MEDIAN][series.name] == pytest.approx(float(np.median(times)))
        assert rows["congestion_share"][series.name] == pytest.approx(series.curve.point.bandwidth_gbps / 25)
        assert rows["fit_n"][series.name] == series.fit.n
    assert data["answer"][0].startswith("resnet50-consistent has the shortest iteration at 80% load: ")
    assert rows["slowdown:heavy"]["vgg16-consistent"] > rows["slowdown:heavy"]["resnet50-consistent"]


@pytest.mark.parametrize("resumed", [(2, 3, 4), (1, 2, 3, 4)], ids=["after the points without load", "between them"])
def test_points_without_cross_traffic_are_found_in_every_job_of_a_resumed_series(tmp_path, capsys, resumed):
    write_sweep(tmp_path / "sweep", [("vgg16", "consistent"), ("resnet50", "consistent")], (0.0, 0.0, 5.0, 15.0, 20.0))
    log, series = tmp_path / "sweep" / "points.jsonl", tmp_path / "sweep" / "series"
    shutil.copytree(series / "vgg16-consistent-1", series / "vgg16-consistent-2")
    lines = log.read_text().splitlines(keepends=True)
    for number in resumed:
        lines[number] = lines[number].replace("vgg16-consistent-1", "vgg16-consistent-2")
    log.write_text("".join(lines))
    assert main(["compare", str(tmp_path / "sweep"), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    rows = {row["measure"]: row["values"] for row in data["measures"]}
    times = np.concatenate(
        [one.iteration_s for one in ringtap.open_sweep(tmp_path / "sweep")["vgg16-consistent"].alone]
    )
    assert rows[MEDIAN]["vgg16-consistent"] == pytest.approx(float(np.median(times)))
    assert data["runs"][0]["iterations"] == len(times) == 48
    assert not any("no point without cross traffic" in note for note in data["runs"][0]["notes"])
    assert any("in 2 jobs: only its" in note for note in data["runs"][0]["notes"]) == (1 in resumed)


def test_series_of_bursts_are_ordered_by_their_means(tmp_path):
    """Most iterations fall between bursts: their median is the shortest, and their mean the longest."""
    pairs = [("vgg16", "consistent"), ("vgg16", "burst")]
    loads, random = (0.0, 7.5, 12.5, 15.0, 17.5, 20.0, 21.0), np.random.default_rng(7)

    def even(load):
        return 0.2 * np.exp(3.0 / np.sqrt(25 - load))

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(CURVES, pairs[0], even)
        patch.setitem(CURVES, pairs[1], lambda load: even(load) * np.where(random.random(102) < 0.3, 3.0, 0.8))
        write_sweep(tmp_path / "sweep", pairs, loads, iterations=100)
    found = compare_runs([tmp_path / "sweep"])
    loaded = row_of(found, LOADED)
    assert loaded.values[0] > loaded.values[1]
    assert found.answer[0].startswith("vgg16-consistent has the shortest iteration at 80% load: ")
    assert "in the mean" in found.answer[0]
    assert "beyond chance" in found.answer[1]


def test_a_sweep_is_compared_at_the_same_load(tmp_path):
    """Burst traffic slows more at equal load, but the generator delivered less of it."""
    pairs = [("vgg16", "consistent"), ("vgg16", "burst")]
    loads = (0.0, 7.5, 12.5, 15.0, 17.5, 20.0, 22.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(CURVES, pairs[0], lambda load: 0.2 * np.exp(3.0 / np.sqrt(25 - load)))
        patch.setitem(CURVES, pairs[1], lambda load: 0.19 * np.exp(3.3 / np.sqrt(25 - load)))
        write_sweep(tmp_path / "sweep", pairs, loads, iterations=100, delivered={"consistent": 0.97, "burst": 0.88})
        truth = np.divide(*(CURVES[pair](0.88 * 22.0) for pair in reversed(pairs)))
    found = compare_runs([tmp_path / "sweep"])
    assert found.answer[0].startswith("vgg16-consistent has the shortest iteration at 77% load: ")
    ratio = found.pairs[0, 1].median_ratio
    assert ratio.low < truth < ratio.high
    said = re.match(
        r"vgg16-burst takes ([\d.]+) times as long as vgg16-consistent \(95 % interval ([\d.]+) to ([\d.]+)\), beyond "
        r"chance \(p < 0.001\)",
        found.answer[1],
    )
    assert said
    mean, low, high = map(float, said.groups())
    assert low < truth < high
    assert mean == pytest.approx(truth, rel=0.02)
    alone = row_of(found, MEDIAN)
    assert alone.title == "iteration without cross traffic, median"
    assert row_of(found, LOADED).title == "iteration at 77% load, median"
    sweep = ringtap.open_sweep(tmp_path / "sweep")
    assert sweep.compare("vgg16-consistent", "vgg16-burst").median_ratio == ratio
    assert sweep.compare("vgg16-consistent", "vgg16-burst", "15gbit").median_ratio.value < ratio.value
    with pytest.raises(UsageError, match=r"vgg16-consistent is not known at 24 Gbit/s: no points .* both sides"):
        sweep.compare("vgg16-consistent", "vgg16-burst", 24.0)


def test_series_that_share_no_load_are_compared_without_cross_traffic(tmp_path):
    write_sweep(tmp_path / "one", [("vgg16", "consistent")], (0.0, 5.0, 8.0))
    write_sweep(tmp_path / "two", [("vgg16", "burst")])
    found = compare_runs([tmp_path / "one", tmp_path / "two"])
    assert "iteration without cross traffic" in found.answer[0]
    assert row_of(found, "mean:heavy").reasons[0].startswith("no point of several iterations lies within 12 percentage")


def test_a_difference_that_is_too_small_to_matter_is_not_told_as_one():
    draw = np.random.default_rng(5)
    times = draw.normal(0.2, 0.0002, (3, 400))
    found = compare_measures([run_of("a", times[0]), run_of("b", times[1] * 1.003), run_of("c", times[2] * 1.3)])
    assert found.answer[0] == (
        "No difference of 2% or more beyond chance between a and b was found: an iteration of a takes 200 ms (median)."
    )
    assert found.answer[1].endswith(", beyond chance, but less than 2% (p < 0.001).")
    assert found.answer[2].endswith(", beyond chance (p < 0.001).")
    (row,) = compare_measures([run_of("a", times[0]), run_of("b", times[1] * 1.003)]).rows
    assert row.is_beyond_chance and chance(row) == "yes, under 2% (p < 0.001)"


def test_of_many_runs_the_answer_names_a_few():
    draw = np.random.default_rng(6)
    runs = [run_of(f"r{number:02}", draw.normal(0.2 + 0.02 * number, 0.001, 60)) for number in range(30)]
    found = compare_measures(runs)
    assert [line.split(" ")[0] for line in found.answer] == ["r00", "r01", "r02", "r03", "r28", "r29", "24"]
    equal = compare_measures([run_of(f"r{number:02}", draw.normal(0.2, 0.001, 60)) for number in range(30)])
    assert re.search(r"between (r\d\d, ){3}r\d\d and \d+ more was found", equal.answer[0])


def test_a_series_says_that_it_averages_several_loads(tmp_path, capsys):
    write_sweep(tmp_path / "sweep", [("vgg16", "consistent"), ("vgg16", "burst")])
    one, other = (tmp_path / "sweep" / "series" / f"vgg16-{kind}-1" for kind in ("consistent", "burst"))
    said = f"is a series of the sweep {tmp_path / 'sweep'}: its numbers are averages over 6 windows of different loads"
    assert main(["analyze", str(one)]) == 0
    assert capsys.readouterr().out.startswith(f"{one.name} {said}, settling and warm-up; ringtap report ")
    assert main(["compare", str(one), str(other)]) == 0
    assert capsys.readouterr().out.count(said) == 2
    first, second = (ringtap.open_job(path).iterations["iteration_s"] for path in (one, other))
    with pytest.warns(UserWarning, match="Sweep.compare compares series at one load"):
        ringtap.compare(first, second)
    (tmp_path / "sweep" / "points.jsonl").write_text("{\n")
    assert main(["analyze", str(one)]) == 0, "a damaged sweep keeps nobody from reading one of its jobs"


def test_a_series_is_compared_in_its_windows_if_clocks_differ(tmp_path, capsys):
    write_sweep(tmp_path / "sweep", [("vgg16", "consistent"), ("resnet50", "consistent")])
    assert main(["compare", str(tmp_path / "sweep"), "--json"]) == 0
    expected = json.loads(capsys.readouterr().out)["measures"]
    for job in (tmp_path / "sweep" / "series").iterdir():
        own_ns = set_ahead(job, {"S0": 0, "S1": 50 * MS, "S3": -150 * MS, "switch": 0}, "S0")
        retime_windows(tmp_path / "sweep" / "points.jsonl", f"series/{job.name}", own_ns)
    assert main(["compare", str(tmp_path / "sweep"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["measures"]
    for one, same in zip(found, expected, strict=True):
        assert one["values"] == {
            name: value if value is None else pytest.approx(value) for name, value in same["values"].items()
        }, one["measure"]


def test_the_page_holds_everything_and_is_not_overwritten(jobs, tmp_path, capsys):
    page = tmp_path / "page.html"
    command = ["compare", *map(str, jobs), "-o", str(page)]
    assert main(command) == 0
    assert f"Wrote {page}" in capsys.readouterr().out
    text = page.read_text()
    assert "small has the shortest iteration: 200 ms in the median." in text
    assert text.count('class="figure"') == 2
    assert not re.search(r"(src|href)=\"(?!data:|#)", text), "nothing lies beside the page"
    assert list(tmp_path.iterdir()) == [page]
    assert main(command) == 2
    assert "is there already" in capsys.readouterr().err
    assert main([*command, "--force"]) == 0
    assert main([*command[:-1], str(tmp_path / "no" / "page.html")]) == 2


def test_wrong_runs_are_refused_in_one_sentence(jobs, tmp_path, capsys):
    small, large = map(str, jobs)
    write_sweep(tmp_path / "sweep", [("vgg16", "consistent")])
    sweep = str(tmp_path / "sweep")
    (tmp_path / "empty").mkdir()
    for runs, said in (
        ([small], "is one run: name two or more to compare"),
        ([small, large, f"{small}/."], "is named twice"),
        ([small, str(tmp_path / "empty")], "empty"),
        ([small, str(tmp_path / "nothing")], "there is no"),
        ([small, sweep], f"name sweeps alone, or the job of a series, for example {sweep}/series/vgg16-consistent-1"),
        ([sweep], "1 series with a point, and two or more are compared"),
    ):
        assert main(["compare", *runs]) == 2, runs
        (line,) = capsys.readouterr().err.splitlines()
        assert said in line
    with pytest.raises(UsageError, match="no run is named"):
        compare_runs([])


def test_runs_without_a_common_measure_are_refused(tmp_path):
    for name in ("a", "b"):
        RunDirectory.create(tmp_path / name, "job", ["ringtap", "run"], 0).finish("complete")
    with pytest.raises(UsageError, match="a and b have no measure in common: "):
        compare_runs([tmp_path / "a", tmp_path / "b"])


def test_samples_at_one_time_are_one(tmp_path):
    """Of each three samples of the interfaces, a damaged log has two at the time of the first."""
    for name in ("one", "two"):
        write_ddp_job(tmp_path / name, SMALL)
    path = tmp_path / "two" / "nodes" / "n1" / "nic" / "nic.rec"
    file = open_records(path)
    records = np.fromfile(path, np.dtype([(field.name, field.type) for field in file.fields]), offset=file.offset)
    for name in ("t_ns", "mono_ns"):
        records[name] = records[name][np.arange(len(records)) // 3 * 3]
    header = path.read_bytes()[: file.offset]
    path.write_bytes(header + records.tobytes())
    found = compare_runs([tmp_path / "one", tmp_path / "two"])
    one, two = row_of(found, "peak_to_mean_sockets:0.1").values
    assert two == pytest.approx(one, rel=0.5)


@pytest.mark.filterwarnings("error")
def test_training_connections_that_send_nothing_have_no_peak(tmp_path):
    """Beside them, other traffic is sent."""
    paths = [tmp_path / "one", tmp_path / "two"]
    for path in paths:
        write_ddp_job(path, Truth(gradient_bytes=0))
    found = compare_runs(paths)
    assert row_of(found, MEDIAN).values == pytest.approx((0.2, 0.2))
    assert "peak_to_mean_sockets:0.1" not in {row.name for row in found.rows}
