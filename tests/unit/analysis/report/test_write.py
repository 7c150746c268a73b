import base64
import csv
import io
import itertools
import json
import re
import shutil
import subprocess
import sys
import time
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pandas as pd
import pytest
from matplotlib import image

from ringtap.analysis import published_results
from ringtap.analysis.model.fit import CongestionModel
from ringtap.analysis.plots.job import FIGURES as JOB_FIGURES
from ringtap.analysis.report.inputs import of_sweep
from ringtap.analysis.report.load_statistics import order_kinds
from ringtap.analysis.report.thesis_expectations import check
from ringtap.analysis.runs.run import SweepRun, read_run
from ringtap.cli import main
from ringtap.core.append_only_logs import open_records
from ringtap.core.thesis_neural_networks import PROFILES
from tests.gold.analysis_sweep import CURVES, LOADS_GBPS, edit_info, write_sweep
from tests.gold.job_run import Truth, write_ddp_job
from tests.gold.shared_jobs import sharing
from tests.unit.browser import CHROMIUM, FIREFOX, Browser, Firefox

CAPACITY = ["--capacity", "25gbit"]
pytestmark = [pytest.mark.computes, pytest.mark.long, pytest.mark.together]

PAIRS = [("vgg16", "consistent"), ("vgg16", "burst"), ("resnet50", "consistent")]


@pytest.fixture(scope="module")
def reported(tmp_path_factory):
    path = tmp_path_factory.mktemp("report") / "sweep"
    truth = write_sweep(path, PAIRS)
    assert main(["report", str(path)]) == 0
    return path, truth, json.loads((path / "report" / "report.json").read_text(), parse_constant=pytest.fail)


class Resources(HTMLParser):
    def __init__(self):
        super().__init__()
        self.links, self.tags, self.text, self.scripts = [], [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.links += [value for name, value in attrs if name in ("src", "href", "srcset", "data", "action")]

    def handle_data(self, data):
        (self.scripts if self.tags[-1:] in (["script"], ["style"]) else self.text).append(data)


def series_of(path):
    run = read_run(path)
    assert isinstance(run, SweepRun)
    return of_sweep(run).series


def page(path):
    parsed = Resources()
    parsed.feed((path / "report" / "report.html").read_text())
    return parsed


FIGURES = [
    *("iteration-times", "rescaled", "traffic-kinds", "throughput", "distributions", "spread-and-growth", "total-load"),
    "congestion-points",
]


def test_the_page_needs_nothing_else(reported):
    parsed = page(reported[0])
    pictures = {f"figures/{name}.{kind}" for name in FIGURES for kind in ("png", "svg")}
    assert {link for link in parsed.links if not link.startswith(("#", "data:"))} == pictures
    assert not {"link", "iframe", "img", "object", "base"} & set(parsed.tags)
    raw = (reported[0] / "report" / "report.html").read_text()
    assert "url(" not in raw.replace("url(#", "")
    assert "@import" not in raw
    # every other address in the page names a vocabulary and is never fetched
    assert set(re.findall(r"https?://[^\"' <]+", raw)) == {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    assert not re.search(r"\b(nan|NaN|None|inf|Undefined)\b", " ".join(parsed.text))


def test_every_reference_in_the_page_leads_somewhere_once(reported):
    raw = (reported[0] / "report" / "report.html").read_text()
    ids = re.findall(r' id="([^"]*)"', raw)
    assert len(ids) == len(set(ids))
    used = set(re.findall(r'(?:href="#|url\(#)([^")]+)', raw))
    assert used <= set(ids)


def test_the_page_alone_gives_the_data(reported):
    path = reported[0] / "report"
    content = [base64.b64decode(link.split(",", 1)[1]) for link in page(reported[0]).links if link.startswith("data:")]
    for name in ("points.csv", "report.json", *(f"figures/{figure}.csv" for figure in FIGURES)):
        assert (path / name).read_bytes() in content


def test_every_mark_says_what_it_is(reported):
    raw = (reported[0] / "report" / "report.html").read_text()
    start = raw.index('id="figure-iteration-times"')
    said = re.findall(r"<use [^>]*><title>([^<]*)</title></use>", raw[start : raw.index("</figure>", start)])
    assert len(said) == len(reported[1])
    for text, (name, load, mean) in zip(said, reported[1], strict=True):
        title, bandwidth, time, p99, rate, count = text.split("\n")
        assert title.split(",")[0].lower().replace("-", "") == name.split("-")[0]
        assert float(bandwidth.split()[0]) == pytest.approx(load, abs=0.15)
        assert float(time.split()[1]) == pytest.approx(mean, rel=1e-3)
        assert p99.startswith("p99 ")
        # three ranks with the batch of Table 2.1
        assert float(rate.split()[0]) == pytest.approx(3 * 64 / mean, rel=1e-3)
        assert count == "24 iterations"


def test_pictures_and_tables_can_be_read_by_machines_for_the_blind(reported):
    parsed = page(reported[0])
    assert parsed.tags.count("h1") == 1
    raw = (reported[0] / "report" / "report.html").read_text()
    for drawing in re.findall(r'<svg [^>]*class="figure"[^>]*>', raw):
        assert re.search(r'role="img" .*aria-label="[^"]{40,}"', drawing)
    for table in re.findall(r"<table>.*?</table>", raw, re.DOTALL):
        assert '<thead><tr><th scope="col"' in table


HOSTILE = "<script>alert(1)</script>\"'&$\\frac{ {{7*7}} \u0007"


def test_text_of_the_machines_stays_text(tmp_path):
    path = tmp_path / "sweep"
    write_sweep(path, [("vgg16", "consistent"), ("vgg16", "burst")])
    info = json.loads((path / "run.json").read_text())
    info["plan"]["models"][0]["title"] = info["plan"]["name"] = HOSTILE
    info["plan"]["topology"] |= {"cross_from": HOSTILE, "workers": [HOSTILE] * 3}
    lab = {"links": [{"host": HOSTILE, "direction": HOSTILE, "asked_bps": 1e9, "measured_bps": 1e9}]}
    missing = [{"what": HOSTILE, "why": HOSTILE}]
    host = {"name": HOSTILE, "kernel": HOSTILE, "python": HOSTILE, "processors": 2}
    changes = {"argv": ["ringtap", HOSTILE], "lab": lab, "not_collected": missing, "calibration": {"host": host}}
    edit_info(path, **{**info, **changes, "why": HOSTILE, "status": "partial"})
    facts = {"host": HOSTILE, "kernel": HOSTILE, "nics": {HOSTILE: {"mtu": 1500, "driver": HOSTILE}}, "links": 3}
    node = path / "series" / "vgg16-consistent-1" / "nodes" / "S0" / "node.json"
    node.write_text(json.dumps({"before": facts, "collectors": {HOSTILE: {"state": "lost", "reason": HOSTILE}}}))
    (node.parent.parent / "S1" / "node.json").write_text("[torn")
    assert main(["report", str(path)]) == 0
    parsed = page(path)
    raw = (path / "report" / "report.html").read_text()
    assert parsed.tags.count("script") == raw.count("<script") == 1
    assert "alert(1)" not in "".join(parsed.scripts)
    assert "{{7*7}}" in raw
    assert "".join(parsed.text).count("<script>alert(1)</script>") >= 15
    for name in ("iteration-times", "traffic-kinds", "distributions"):
        drawing = ElementTree.parse(path / "report" / "figures" / f"{name}.svg")
        assert not [item for item in drawing.iter() if item.tag.endswith("script")]
        assert any("<script>alert(1)</script>" in text for text in drawing.getroot().itertext())


def test_many_collectives_and_topologies_have_a_row_each(tmp_path: Path) -> None:
    table, folder = tmp_path / "runs.csv", tmp_path / "out"
    names = ["ring", "tree", "double-tree", "in-network"]
    rows = [
        f"vgg16,consistent,{name},{topology},{load},{0.2 + 0.01 * number + 0.001 * load},4\n"
        for number, name in enumerate(names) for topology in ("star", "leaf-spine") for load in (0, 10)
    ]  # fmt: skip
    table.write_text("model,traffic,collective,topology,bandwidth_gbps,iteration_s,workers\n" + "".join(rows))
    assert main(["report", str(table), *CAPACITY, "-o", str(folder)]) == 0
    data = json.loads((folder / "report.json").read_text())
    assert [one["series"] for one in data["series"]][:2] == [
        "vgg16-consistent-ring-star",
        "vgg16-consistent-ring-leaf-spine",
    ]
    assert {one["topology"] for one in data["series"]} == {"star", "leaf-spine"}
    figures = {path.stem for path in (folder / "figures").glob("*.png")}
    assert "variant-times" in figures
    assert not figures & {"transport-times", "transports"}
    drawn = (folder / "figures" / "variant-times.svg").read_text()
    places = [drawn.index(f">{name}<") for name in reversed(names)]
    assert places == sorted(places)  # ticks are written from below, and the fastest one is on top
    lines = (folder / "figures" / "iteration-times.svg").read_text()  # a panel per topology, and a line per collective
    assert all(lines.count(f">{text}<") == 1 for text in (*names, f"{data['series'][0]['title']}, leaf-spine"))
    alone = [row for row in rows if ",0,0." in row]
    table.write_text("model,traffic,collective,topology,bandwidth_gbps,iteration_s,workers\n" + "".join(alone))
    assert main(["report", str(table), *CAPACITY, "-o", str(folder), "--force"]) == 0
    assert {path.stem for path in (folder / "figures").glob("*.png")} == {"variant-times"}
    assert (folder / "report.html").read_text().count('id="figure-variant-times"') == 1
    # two give lines side by side, as before
    table.write_text("model,traffic,collective,bandwidth_gbps,iteration_s,workers\nvgg16,iperf,ring,0,0.2,4\n"
                     "vgg16,iperf,ring,9,0.3,4\nvgg16,iperf,tree,0,0.2,4\nvgg16,iperf,tree,9,0.4,4\n")  # fmt: skip
    assert main(["report", str(table), *CAPACITY, "-o", str(folder), "--force"]) == 0
    figures = {path.stem for path in (folder / "figures").glob("*.png")}
    assert "transport-times" in figures
    assert "variant-times" not in figures


def test_a_table_makes_the_same_report(tmp_path, reported, capsys):
    rows = [f"{one.title},{one.traffic},{point.cross_gbps!r},{seconds!r},64\n" for one in series_of(reported[0])
            for point in one.points for seconds in point.iteration_s.tolist()]  # fmt: skip
    table = tmp_path / "runs.csv"
    table.write_text("model,traffic,bandwidth_gbps,iteration_s,batch\n" + "".join(rows))
    folder = tmp_path / "out"
    assert main(["report", str(table), *CAPACITY, "-o", str(folder), "--workers", "3"]) == 0
    data = json.loads((folder / "report.json").read_text())
    for here, there in zip(data["series"], reported[2]["series"], strict=True):
        assert here["congestion_point"] == there["congestion_point"]
        assert here["tails"] == there["tails"]
        assert here["demand_mb"] == there["demand_mb"]
        for point, same in zip(here["points"], there["points"], strict=True):
            assert point["samples_per_s"] == pytest.approx(same["samples_per_s"])
        assert here["fit"]["B"] == pytest.approx(there["fit"]["B"])
    # a table does not have the total
    assert sorted(path.name for path in (folder / "figures").iterdir()) == sorted(
        path.name for path in (reported[0] / "report" / "figures").iterdir() if path.stem != "total-load"
    )
    capsys.readouterr()
    assert main(["report", str(table), *CAPACITY, "-o", str(folder), "--workers", "3"]) == 2
    assert "--force" in capsys.readouterr().err
    for arguments, says in (
        ([str(reported[0]), "--workers", "3"], "is for a table"),
        ([str(table), *CAPACITY, "-o", str(tmp_path / "other")], "how many workers"),
        ([str(table), "--workers", "3"], "does not say the capacity of the bottleneck: give --capacity"),
        ([str(table), "--workers", "1"], "two at least"),
        ([str(table), "--workers", "3", "--capacity", "0gbit"], "positive rate"),
    ):
        assert main(["report", *arguments]) == 2
        assert says in capsys.readouterr().err


def test_the_total_is_drawn_against_what_was_offered(reported):
    with (reported[0] / "report" / "figures" / "total-load.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(reported[1])
    for row, (_, load, _) in zip(rows, reported[1], strict=True):
        # the sweep requests 5 % more than it carries, and trains with 2 Gbit/s
        assert float(row["offered_gbps"]) == pytest.approx(1.05 * load + 2, abs=0.02)
        assert float(row["total_gbps"]) == pytest.approx(load + 2, abs=0.02 * load + 0.02)
        assert float(row["utilisation"]) == pytest.approx(float(row["total_gbps"]) / 25)


def test_the_bottleneck_is_said_to_be_as_full_as_it_was(reported):
    data = reported[2]
    (said,) = [item for item in data["findings"] if item["text"].startswith("Of its capacity, the bottleneck")]
    share = data["overview"][0]["slowdowns"][-1]["share"]
    # training takes 2 Gbit/s at every load
    assert said["text"] == (
        f"Of its capacity, the bottleneck carried {100 * (share + 2 / 25):.0f} % under consistent web-search and "
        f"{100 * (share + 2 / 25):.0f} % under burst web-search at 80 % load."
    )
    assert "around 90 % under burst traffic" in said["why"]


def test_points_have_their_streams_deviation_and_utilisation_in_the_table(tmp_path):
    path = tmp_path / "sweep"
    write_sweep(path, [("vgg16", "iperf"), ("vgg16", "burst")], loads_gbps=(0.0, 10.0))
    lines = [json.loads(line) for line in (path / "points.jsonl").read_text().splitlines()]
    lines[1]["iperf_streams"] = 7
    (path / "points.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["report", str(path)]) == 0
    raw = (path / "report" / "report.html").read_text()
    iperf, burst = (raw.split('aria-label="Points of ')[number].split("</table>")[0] for number in (1, 2))
    cells = [re.findall(r'<td class="n">([^<]*)</td>', row) for row in iperf.split("<tr>")[2:]]
    # requested, measured, deviation, streams, testbed, training, utilisation
    assert [row[3] for row in cells] == ["–", "7"]
    assert cells[1][6] == "48.0 %"
    assert all(re.fullmatch(r"0\.\d\d", row[2]) for row in cells)
    assert "streams" not in burst


def write_running(path, loads_gbps, **changes):
    write_sweep(path, [("resnet50", "consistent")], loads_gbps=loads_gbps)
    edit_info(path, **{"status": "running", "report": True} | changes)
    assert main(["report", str(path)]) == 0
    return (path / "report" / "report.html").read_text()


@pytest.mark.parametrize("loads", [(0.0,), (0.0, 7.5, 12.5), (7.5,)])
def test_the_page_of_a_sweep_that_runs_shows_the_first_points(tmp_path, loads):
    raw = write_running(tmp_path / "sweep", loads)
    points = "1 point" if len(loads) == 1 else f"{len(loads)} points"
    need = "the slowdown at 80 % load and the congestion point need more."
    assert f'<div class="found"><p>{points} so far: {need}</p></div>' in raw
    assert "This sweep is running." in raw
    assert "location.reload()" in raw
    until_ms = int(re.search(r"until = (\d+)", raw)[1])
    assert 1700 < until_ms / 1e3 - time.time() < 1800
    # one load without cross traffic has no place on an axis of C/(C-BW)
    assert ('id="figure-rescaled"' in raw) == (loads != (0.0,))
    figure = raw.split('id="figure-iteration-times"')[1].split("</figure>")[0]
    assert "Points without a fit are joined by thin lines." in figure


def test_a_sweep_that_runs_and_has_no_point_has_a_page(tmp_path):
    path = tmp_path / "sweep"
    write_sweep(path, [("resnet50", "consistent")], loads_gbps=(0.0,))
    (path / "points.jsonl").unlink()
    edit_info(path, status="running", report=True)
    assert main(["report", str(path)]) == 0
    assert "0 points so far" in (path / "report" / "report.html").read_text()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"status": "complete"}, None),
        ({"status": "partial", "why": "interrupted"}, "This sweep is partial."),
        ({"status": "failed", "why": "the link broke"}, "the link broke"),
        ({"report": False}, "This sweep is running still, or was cut off."),
    ],
)
def test_the_page_of_a_sweep_that_ended_stays_as_it_is(tmp_path, changes, says):
    raw = write_running(tmp_path / "sweep", (0.0,), **changes)
    assert "location.reload()" not in raw
    assert "so far:" not in raw
    assert says is None or says in raw


def test_fits_are_limited_to_a_range_of_loads(tmp_path, reported, capsys):
    folder = tmp_path / "limited"
    assert main(["report", str(reported[0]), "--max-load", "17gbit", "-o", str(folder)]) == 0
    data = json.loads((folder / "report.json").read_text())
    for one, whole in zip(data["series"], reported[2]["series"], strict=True):
        inside = [point for point in one["points"] if point["cross_gbps"] <= 17]
        fitted = CongestionModel(25).fit([p["cross_gbps"] for p in inside], [p["mean_s"] for p in inside])
        assert (one["fit"]["A"], one["fit"]["B"], one["fit"]["points"]) == (fitted.A, fitted.B, len(inside))
        assert one["congestion_point"] == whole["congestion_point"]
    assert "points up to 17 Gbit/s" in (folder / "report.html").read_text()
    assert f"Fitted to the {len(inside)} points up to 17.0 Gbit/s." in (folder / "report.html").read_text()
    assert main(["report", str(reported[0]), "--max-load", "8gbit", "-o", str(folder), "--force"]) == 0
    data = json.loads((folder / "report.json").read_text())
    few = "2 points at 2 loads up to 8 Gbit/s are too few: this fit needs 4 at 3 different loads"
    assert {one["fit_reason"] for one in data["series"]} == {few}
    capsys.readouterr()
    assert main(["report", str(reported[0]), "--max-load", "0gbit"]) == 2
    assert capsys.readouterr().err == "ringtap: --max-load (max_load=) 0 Gbit/s is not a positive rate\n"


def test_the_first_screen_answers_and_warnings_follow(reported):
    raw = (reported[0] / "report" / "report.html").read_text()
    data = reported[2]
    headline, figure, table, warnings = (
        raw.index(words)
        for words in (data["answer"], 'id="figure-iteration-times"', 'aria-label="Series"', 'id="warnings"')
    )
    assert headline < figure < table < warnings < raw.index('id="times"')
    assert raw[table:warnings].split("</table>")[0].count('<tr><th scope="row">') == len(PAIRS)
    assert [row["series"] for row in data["overview"]] == [f"{model}-{traffic}" for model, traffic in PAIRS]
    found = data["findings"]
    assert {item["firm"] for item in found} == {True, False}
    for item in found:
        assert item["why"]
        assert item["text"].endswith(".")
        # what is not firm is a warning; what is firm comes before them
        assert ('<h2 id="warnings">' in raw[: raw.index(item["why"].replace("'", "&#39;"))]) != item["firm"]
    # 24 iterations cannot bound a p99 from above
    assert any("have no upper bound" in item["text"] and not item["firm"] for item in found)


def test_the_page_of_a_sweep_without_cross_traffic_speaks_of_none(tmp_path, capsys):
    rows = ["model,traffic,bandwidth_gbps,iteration_s", "resnet50,iperf,0,0.2", "vgg16,iperf,0,0.4"]
    (tmp_path / "points.csv").write_text("\n".join(rows) + "\n")
    assert (
        main(["report", str(tmp_path / "points.csv"), *CAPACITY, "--workers", "4", "-o", str(tmp_path / "page")]) == 0
    )
    assert "ResNet-50 and VGG-16 without cross traffic, capacity 25 Gbit/s: 2 points." in capsys.readouterr().out
    raw = (tmp_path / "page" / "report.html").read_text()
    assert "<h1>points: training without cross traffic</h1>" in raw
    (table,) = re.findall(r'aria-label="Points of Without cross traffic".*?</table>', raw, re.DOTALL)
    assert re.findall(r'<th scope="row">(.*?)</th>', table) == ["ResNet-50", "VGG-16"]
    for words in ("Congestion begins", "Slowdown at", 'id="fits"', 'id="compared"', "BW*", "under iperf"):
        assert words not in raw
    checks = json.loads((tmp_path / "page" / "report.json").read_text())["checks"]
    assert {item["expected"].partition(" within ")[0] for item in checks} == {"iteration time without cross traffic"}


def test_the_rows_of_the_first_screen_are_the_numbers_of_the_series(reported):
    for row, one, tail in zip(reported[2]["overview"], series_of(reported[0]), reported[2]["series"], strict=True):
        assert row["no_load_s"] == one.no_load_s
        assert row["slowdowns"][-1]["slowdown"] == pytest.approx(tail["tails"]["growth"] - 1)
        assert row["slowdowns"][-1]["interval"] == pytest.approx([end - 1 for end in tail["tails"]["growth_interval"]])
        assert (row["fit"]["A"], row["fit"]["points"]) == (one.fit.A, len(LOADS_GBPS))
        truth = CURVES[one.model, one.traffic]
        assert row["slowdowns"][0]["slowdown"] == pytest.approx(truth(12.5) / truth(0.0) - 1, abs=0.03)


def test_the_page_holds_every_section(reported):
    text = " ".join(page(reported[0]).text)
    for words in (
        "What was run", "scale model", "What the links gave", "Can the generator fill", "Points", "Demand", "Fits of t",
        "Beside the thesis", "What does not come out", "What was not collected", "the plan did not ask for captures",
        "Table 3.4", "737.9", "chosen",
    ):  # fmt: skip
        assert words in text


def test_json_and_csv_hold_the_points(reported):
    path, truth, data = reported
    points = [point for series in data["series"] for point in series["points"]]
    with (path / "report" / "points.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(points) == len(truth)
    for row, point, (name, load, mean) in zip(rows, points, truth, strict=True):
        assert row["series"] == point["series"] == name
        assert point["mean_s"] == pytest.approx(mean, rel=1e-6)
        assert point["cross_gbps"] == pytest.approx(load, abs=0.15)
        for key, value in point.items():
            if isinstance(value, float):
                assert float(row[key]) == pytest.approx(value)


def test_the_numbers_are_those_of_the_functions(reported):
    series = {item["series"]: item for item in reported[2]["series"]}
    vgg = series["vgg16-consistent"]
    assert vgg["demand_mb"] == pytest.approx(737.9, abs=0.1)
    assert vgg["required_gbps"] == pytest.approx(vgg["demand_mb"] * 8 / 1000 / vgg["no_load_s"])
    assert vgg["fit"]["model"] == "n = 1/2"
    assert vgg["fit"]["B"] == pytest.approx(5.5, rel=0.05)
    point = vgg["congestion_point"]
    assert point["data_mb"] == pytest.approx((25 - point["bandwidth_gbps"]) * point["iteration_s"] * 125)
    worst = vgg["most_congested"]
    assert worst["experimental_gbps"] == pytest.approx(25 - worst["bandwidth_gbps"])
    assert worst["ideal_gbps"] == pytest.approx(vgg["demand_mb"] * 8 / 1000 / worst["iteration_s"])
    assert vgg["mean_difference_gbps"] > 0
    assert vgg["thesis"]["congestion"]["table"] == "Table 3.4"
    assert vgg["thesis"]["congestion"]["over_demand"] == pytest.approx(1.34, abs=0.01)
    assert all(item["ok"] for item in reported[2]["checks"] if item["subject"] == "vgg16-consistent")


def test_regenerating_replaces_and_leaves_nothing_else(reported, capsys):
    folder = reported[0] / "report"
    before = {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    (folder / "figures" / "iteration-times.pdf").write_text("stale")
    assert main(["report", str(reported[0])]) == 0
    out = capsys.readouterr().out
    assert f"Wrote {folder / 'report.html'}" in out
    assert "made-up: complete" in out
    after = {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert after == before


def test_transports_stand_side_by_side(tmp_path):
    draw = np.random.default_rng(3)
    rows = ["model,traffic,transport,bandwidth_gbps,iteration_s,workers\n"]
    for transport, slower in (("RDMA", 1.0), ("TCP", 1.3)):
        for load in LOADS_GBPS:
            times = slower * CURVES["resnet50", "burst"](load) * np.exp(draw.normal(0, 0.02, 40))
            rows += [f"resnet50,burst,{transport},{load},{seconds!r},3\n" for seconds in times.tolist()]
    (tmp_path / "table.csv").write_text("".join(rows))
    assert main(["report", str(tmp_path / "table.csv"), *CAPACITY, "-o", str(tmp_path / "out")]) == 0
    data = json.loads((tmp_path / "out" / "report.json").read_text())
    assert [one["transport"] for one in data["series"]] == ["RDMA", "TCP"]
    heavy = next(pair for pair in data["comparisons"] if pair["share"] == 0.8)
    assert (heavy["by"], heavy["names"]) == ("transport", ["RDMA", "TCP"])
    assert heavy["median_ratio"]["low"] < 1.3 < heavy["median_ratio"]["high"]
    with (tmp_path / "out" / "figures" / "transports.csv").open() as file:
        drawn = [(row["transport"], float(row["bandwidth_gbps"])) for row in csv.DictReader(file)]
    assert set(drawn) == {(transport, load) for transport in ("RDMA", "TCP") for load in (7.5, 20.0)}
    firm = {item["text"].split(" ")[0]: item["firm"] for item in data["findings"]}
    assert firm["Of"]  # the transports: a third apart with a spread of 2 %


def test_kinds_of_traffic_are_put_in_order_at_exactly_the_same_load(reported):
    orders = reported[2]["kind_order"]
    shares = [0.6, pytest.approx(0.8, abs=0.01)]  # the second one is the heaviest that both reach
    assert [(item["title"], item["share"]) for item in orders] == [("VGG-16", share) for share in shares]
    for item in orders:
        assert item["thesis"] == ["consistent", "burst"]
        load_gbps = item["share"] * 25
        for kind in item["kinds"]:
            assert kind["mean_s"] == pytest.approx(CURVES["vgg16", kind["traffic"]](load_gbps), rel=0.04)
            low, high = kind["interval_s"]
            assert 0.9 * kind["mean_s"] < low < kind["mean_s"] < high < 1.1 * kind["mean_s"]
        means = [kind["mean_s"] for kind in item["kinds"]]
        assert means == sorted(means)
        first, second = item["kinds"]
        assert item["firm"] == [first["interval_s"][1] < second["interval_s"][0]]


def test_a_kind_that_was_not_measured_on_both_sides_of_a_load_has_no_mean_there(tmp_path):
    path = tmp_path / "sweep"
    write_sweep(path, PAIRS[:1], loads_gbps=(0.0, 8.0, 14.0, 16.5))
    write_sweep(tmp_path / "other", PAIRS[1:2], loads_gbps=(0.0, 8.0, 17.0, 20.5))
    series = [*series_of(path), *series_of(tmp_path / "other")]
    middle, heavy = order_kinds(series)
    assert [kind.mean_s is None for kind in middle.kinds] == [False, False]
    assert heavy.share == 0.8  # a series that ends at 66 % does not lower it
    assert [(kind.traffic, kind.mean_s is None) for kind in heavy.kinds] == [("burst", False), ("consistent", True)]
    assert heavy.firm == ()
    assert heavy.kinds[1].interval_s is None
    assert heavy.kinds[1].reason == "no point of several iterations lies within 12 percentage points of that load"


def test_the_transports_of_a_sweep_stand_side_by_side_with_the_fits_of_each(tmp_path):
    path = tmp_path / "sweep"
    write_sweep(path, [("bert-large", "consistent"), ("bert-large", "burst")])
    # the series under burst traffic becomes one under consistent traffic over TCP
    over = {"consistent": {"transport": "rdma"}, "burst": {"transport": "tcp", "traffic": "consistent"}}
    points = [json.loads(line) for line in (path / "points.jsonl").read_text().splitlines()]
    for point in points:
        point.update(over[point["traffic"]])
        point["series"] = f"bert-large-consistent-{point['transport']}"
    (path / "points.jsonl").write_text("\n".join(map(json.dumps, points)) + "\n")
    plan = json.loads((path / "run.json").read_text())["plan"]
    models = [plan["models"][0] | {"transport": transport} for transport in ("rdma", "tcp")]
    edit_info(path, plan=plan | {"models": models, "traffic": ["consistent"]})
    assert main(["report", str(path)]) == 0
    data = json.loads((path / "report" / "report.json").read_text())
    rdma, tcp = data["series"]
    assert [(fit["transport"], fit["A"], fit["B"]) for one in (rdma, tcp) for fit in one["thesis"]["fits"]] == [
        ("RDMA", 0.200, 7.281),
        ("TCP", 0.564, 3.667),
    ]
    assert (rdma["thesis"]["no_load_s"], rdma["thesis"]["no_load_table"]) == (0.84, "Table 3.1")
    assert (tcp["thesis"]["no_load_s"], tcp["thesis"]["no_load_table"]) == (1.45, "section 3.4.2")
    assert {(pair["by"], *pair["names"]) for pair in data["comparisons"]} == {("transport", "rdma", "tcp")}
    figures = {each.stem for each in (path / "report" / "figures").glob("*.csv")}
    assert {"transports", "transport-times"} <= figures
    assert "traffic-kinds" not in figures, "there is one kind of traffic"
    with (path / "report" / "figures" / "transport-times.csv").open() as file:
        drawn = [(row["transport"], bool(row["fit_s"])) for row in csv.DictReader(file)]
    assert set(drawn) == {("rdma", True), ("tcp", True)}
    text = " ".join(page(path).text)
    assert "0.84 (Table 3.1)" in text
    assert "1.45 (section 3.4.2)" in text
    # a sample every 50 ms, in windows of some tens of seconds
    errors = [point["counting_error_gbps"] for one in data["series"] for point in one["points"]]
    assert all(0 < error < 0.2 for error in errors)
    assert f"at most {max(errors[: len(errors) // 2]):.2f} Gbit/s of the measured load" in text


def test_the_tables_of_the_reproduction_come_from_the_report(reported, tmp_path):
    path = reported[0] / "report" / "report.json"
    script = Path(__file__).parents[4] / "scripts" / "reproduction.py"
    done = subprocess.run([sys.executable, script, path], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    headings = [line.lstrip("# ") for line in lines if line.startswith("#")]
    assert [head for head in headings if head.startswith(("Times", "Congestion", "Fits", "Most"))] == [
        "Times without cross traffic (Table 3.1)",
        "Congestion points (iperf: Table 3.2, consistent: 3.4, burst: 3.6)",
        "Fits of t = A·exp(B/(C−BW)ⁿ), in log space",
        "Most congested point and spare bandwidth (Tables 3.3, 3.5, 3.7, 3.8)",
    ]
    assert "Order of the kinds of traffic at the same load (section 3.4.2), s" in headings
    vgg = next(one for one in reported[2]["series"] if one["series"] == "vgg16-consistent")
    both = subprocess.run([sys.executable, script, path, path], capture_output=True, text=True, check=True).stdout
    assert both.count("| 990.7 | 1.34 |") == 2 * done.stdout.count("| 990.7 | 1.34 |")
    assert re.search(
        rf"^\| VGG-16, B: [a-z, ]*\| [0-9., ]*{vgg['no_load_s']:.3f}[0-9., ]*\| 0.37 \|$", done.stdout, re.MULTILINE
    )
    assert "| 990.7 | 1.34 |" in done.stdout
    for number, line in enumerate(lines):  # every table is whole
        if line.startswith("|---"):
            width = line.count("---")
            assert lines[number - 1].count("|") == width + 1
            rows = itertools.takewhile(lambda text: text.startswith("|"), lines[number + 1 :])
            assert all(row.replace("\\|", "").count("|") == width + 1 for row in rows)
    every = subprocess.run([sys.executable, script, "--points", path], capture_output=True, text=True, check=True)
    table = pd.read_csv(io.StringIO(every.stdout))
    assert len(table) == sum(len(one["points"]) for one in reported[2]["series"])
    published = pd.read_csv(script.parents[1] / "docs" / "notes" / "reproduction-points.csv")
    assert list(table) == list(published)
    assert (published.groupby("series")["bandwidth_gbps"].size() == 11).all()
    (tmp_path / "old.json").write_text('{"schema": 1}')
    for name, says in (("old.json", "has schema 1"), ("none.json", "is not the report.json")):
        failed = subprocess.run([sys.executable, script, tmp_path / name], capture_output=True, text=True, check=False)
        assert failed.returncode == 2
        assert says in failed.stderr


def test_departures_are_said_plainly(tmp_path):
    path = tmp_path / "sweep"
    write_sweep(path, [("vgg16", "consistent")], loads_gbps=(0.0, 8.0, 14.0, 18.0))
    low = {"kind": "consistent", "requested_bps": 1, "reached_bps": 1, "share_of_capacity": 0.5, "required_share": 0.88}
    edit_info(path, precheck=[low | {"ok": False}])
    lines = (path / "points.jsonl").read_text().splitlines()
    swapped = [json.loads(line) for line in lines]
    # give the lightest load the heaviest one's window: a no-load time far off, and times that fall
    swapped[0] |= {key: swapped[3][key] for key in ("window_start_ns", "window_end_ns")}
    (path / "points.jsonl").write_text("\n".join(map(json.dumps, [*swapped[:3]])) + "\n")
    assert main(["report", str(path)]) == 0
    data = json.loads((path / "report" / "report.json").read_text())
    failed = {item["expected"].split(" ")[0] for item in data["checks"] if item["ok"] is False}
    assert "the" in failed
    text = " ".join(page(path).text)
    assert "it reached 50.0%" in text
    assert "too little" in text
    assert any(item["ok"] is None for item in data["checks"])


@pytest.mark.parametrize("heavier", ["burst", "consistent"])
def test_whether_bursts_spread_times_more_is_judged(tmp_path, heavier):
    path = tmp_path / "sweep"
    noise = {"burst": 0.01, "consistent": 0.01} | {heavier: 0.04}
    write_sweep(path, [("vgg16", "consistent"), ("vgg16", "burst")], noise=noise)
    checks = check({}, series_of(path))
    (tails,) = (item for item in checks if item.expected.startswith("burst traffic spreads"))
    assert (tails.subject, tails.ok) == ("vgg16-burst", heavier == "burst")
    burst, consistent = series_of(path)[::-1]
    within = [load for load in burst.loads_gbps if 12.5 <= load <= consistent.loads_gbps[-1]]
    assert f"over {len(within)} loads" in tails.found and len(within) >= 3


def test_a_partial_sweep_reports_what_there_is(tmp_path, capsys):
    path = tmp_path / "sweep"
    write_sweep(path, PAIRS[:2], loads_gbps=(0.0, 8.0, 14.0), status="partial")
    job = path / "series" / "vgg16-burst-1"
    (job / "run.json").unlink()
    (job / "nodes" / "S0" / "nic" / "nic.rec").unlink()
    step_file = job / "nodes" / "S1" / "steps" / "rank1-101.rec"
    step_file.write_bytes(step_file.read_bytes()[:-5])
    edit_info(path, lab=None, precheck=None)
    assert main(["report", str(path), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["run"]["status"] == "partial"
    assert data["torn"] == {"series/vgg16-burst-1/nodes/S1/steps/rank1-101.rec": 1}
    assert any("cross0.rx_bytes" in item["why"] for item in data["not_collected"])
    burst = data["series"][1]
    assert all(point["unscaled_cross_bps"] is None for point in burst["points"])
    assert burst["fit"] is None
    assert burst["fit_reason"]
    text = " ".join(page(path).text)
    assert "This sweep is partial" in text
    assert "stopped by the user" in text
    assert "Torn last records" in text


def test_a_sweep_without_points_still_has_a_page(tmp_path):
    path = tmp_path / "sweep"
    write_sweep(path, PAIRS[:1], loads_gbps=(0.0, 8.0, 14.0), status="failed")
    (path / "points.jsonl").unlink()
    assert main(["report", str(path)]) == 0
    assert "No point was measured" in " ".join(page(path).text)


def test_the_page_says_whose_congestion_control_is_in_use(tmp_path):
    path = tmp_path / "sweep"
    write_sweep(path, PAIRS[:1], loads_gbps=(0.0, 8.0, 14.0), iterations=6)
    facts = {"before": {"sysctls": {"net.ipv4.tcp_congestion_control": "bbr"}}}
    (path / "series" / "vgg16-consistent-1" / "nodes" / "S0" / "node.json").write_text(json.dumps(facts))
    assert main(["report", str(path)]) == 0
    text = " ".join(page(path).text)
    assert "net.ipv4.tcp_congestion_control = bbr" in text
    assert "cubic: the testbed's routes set it for every connection, whatever the nodes'" in text
    topology = {key: value for key, value in read_run(path).plan["topology"].items() if key != "congestion_control"}
    edit_info(path, plan=read_run(path).plan | {"topology": topology})
    assert main(["report", str(path)]) == 0
    assert "Congestion control" not in " ".join(page(path).text), "the settings of real servers have it"


def test_a_terse_run_description_is_enough(tmp_path):
    path = tmp_path / "sweep"
    write_sweep(path, PAIRS[:1], loads_gbps=(0.0, 8.0, 14.0), iterations=6)
    info = json.loads((path / "run.json").read_text())
    plan = {key: info["plan"][key] for key in ("scale", "capacity_bps", "models")} | {"topology": {"mtu": 1500}}
    edit_info(path, plan=plan, precheck=[{"kind": "consistent", "share_of_capacity": None}], not_collected=None, lab={})
    assert main(["report", str(path)]) == 0
    data = json.loads((path / "report" / "report.json").read_text())
    assert data["series"][0]["workers"] == 3  # counted from the ranks that left steps
    assert data["checks"][0]["ok"] is None
    assert "Everything that was asked for was recorded" in " ".join(page(path).text)


def test_a_jobs_run_has_a_page_of_its_own(tmp_path, capsys):
    truth = write_ddp_job(tmp_path / "job", Truth(iterations=30))
    assert main(["report", str(tmp_path / "job")]) == 0
    assert f"{truth.iteration_ms} ms" in capsys.readouterr().out
    folder = tmp_path / "job" / "report"
    data = json.loads((folder / "report.json").read_text(), parse_constant=pytest.fail)
    assert data["iterations"]["median_s"] == pytest.approx(truth.iteration_ms / 1000)
    with (folder / "iterations.csv").open() as stream:
        assert len(list(csv.DictReader(stream))) == 30
    parsed = page(tmp_path / "job")
    drawn = {f"figures/{name}.{kind}" for name in JOB_FIGURES for kind in ("png", "svg")}
    assert {link for link in parsed.links if not link.startswith(("#", "data:"))} == drawn
    assert all((folder / name).is_file() for name in drawn)
    text = " ".join(parsed.text)
    assert "Slowest rank" in text
    assert all(row["traffic_class"] in text for row in data["flows"]["rows"])
    sent = [row for row in data["flows"]["rows"] if row["traffic_class"] == "training"]
    assert {(row["source_rank"], row["destination_rank"]) for row in sent} <= {
        (a, b) for a in range(9) for b in range(9)
    }


def test_the_page_of_a_job_has_tables(tmp_path):
    write_ddp_job(tmp_path / "job", Truth(iterations=30, busy_ms=(20.0, 40.0)))
    node = tmp_path / "job" / "nodes" / "n0" / "node.json"
    facts = json.loads(node.read_text())
    facts["collectors"] = {"gpu": {"state": "unavailable", "reason": HOSTILE, "remedy": "install <b>it</b>"}}
    node.write_text(json.dumps(facts))
    assert main(["report", str(tmp_path / "job")]) == 0
    raw = (tmp_path / "job" / "report" / "report.html").read_text()
    data = json.loads((tmp_path / "job" / "report" / "report.json").read_text())
    tables = dict(re.findall(r'aria-label="([^"]*)"><table>(.*?)</table>', raw, re.DOTALL))
    assert {"Parts of an iteration", "Ranks", "Links", "Network", "Nodes", "Largest flows", "Not collected"} <= set(
        tables
    )
    assert "<pre>" not in raw
    assert tables["Ranks"].count('<th scope="row">') == 2
    assert '<td class="n">130.00</td>' in tables["Ranks"]
    slowest = data["links"]["rows"][data["links"]["slowest"]]
    assert (slowest["source"], slowest["destination"], data["links"]["stands_out"]) == ("n1", "n0", True)
    assert '<tr class="chosen"><th scope="row">n1</th><td>n0</td>' in tables["Links"]
    assert "<td>50.0%</td>".replace("<td>", '<td class="n">') in tables["Parts of an iteration"]
    assert "&lt;script&gt;alert(1)" in tables["Not collected"]
    assert "install &lt;b&gt;it&lt;/b&gt;" in tables["Not collected"]
    assert raw.count("<script") == 1
    # the answer, the figure of the iterations, then the tables
    assert (
        raw.index(data["headline"][0])
        < raw.index('id="figure-job-iterations"')
        < raw.index('aria-label="Parts of an iteration"')
    )


def test_slow_iterations_and_losses_are_drawn_into_the_iterations(tmp_path):
    write_ddp_job(tmp_path / "job", Truth(iterations=60))
    slow = (20, 40, 50)
    for path in (tmp_path / "job").glob("nodes/*/steps/rank?-???.rec"):
        file = open_records(path)
        records = np.fromfile(path, np.dtype([(one.name, one.type) for one in file.fields]), offset=file.offset)
        for name in ("end_ns", "end_mono_ns"):
            records[name][list(slow)] += 60_000_000
        with path.open("r+b") as stream:
            stream.seek(file.offset)
            stream.write(records.tobytes())
    assert main(["report", str(tmp_path / "job")]) == 0
    raw = (tmp_path / "job" / "report" / "report.html").read_text()
    start = raw.index('id="figure-job-iterations"')
    figure = raw[start : raw.index("</figure>", start)]
    said = re.findall(r"<use [^>]*><title>([^<]*)</title></use>", figure)
    assert [text.split(":")[0] for text in said] == [f"iteration {number}" for number in slow]
    assert all("260 ms" in text and "retransmitted segments: 4" in text for text in said)
    assert "Marked: the 3 slowest. The other panel: retransmitted segments in each." in figure
    with (tmp_path / "job" / "report" / "figures" / "job-iterations.csv").open() as stream:
        assert {float(row["retransmissions"]) for row in csv.DictReader(stream)} == {4.0}


def test_what_no_recorder_timed_of_an_iteration_is_drawn_and_said(tmp_path, capsys):
    truth = write_ddp_job(tmp_path / "job", Truth(iterations=12))
    # the last 40 ms of the 50 of its optimizer's step pass before it begins
    for path in (tmp_path / "job").glob("nodes/*/steps/rank?-???.rec"):
        file = open_records(path)
        records = np.fromfile(path, np.dtype([(one.name, one.type) for one in file.fields]), offset=file.offset)
        records["start_ns"] += 40_000_000
        records["start_mono_ns"] += 40_000_000
        with path.open("r+b") as stream:
            stream.seek(file.offset)
            stream.write(records.tobytes())
    assert main(["report", str(tmp_path / "job")]) == 0
    assert "Not attributed: 40 ms (20.0% of the iteration" in capsys.readouterr().out
    folder = tmp_path / "job" / "report"
    with (folder / "figures" / "job-ranks.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    assert len(rows) == 2
    for row in rows:
        assert float(row["unattributed_s"]) == pytest.approx(0.04, abs=1e-6)
        parts = [float(row[name]) for name in ("compute_s", "exposed_s", "optimizer_s", "unattributed_s")]
        assert sum(parts) == pytest.approx(truth.iteration_ms / 1000, abs=1e-6)
    assert "not attributed" in (folder / "figures" / "job-ranks.svg").read_text()
    assert "Not attributed is what no recorder times" in (folder / "report.html").read_text()


def test_a_job_that_ended_early_is_said_so_once(tmp_path, capsys):
    write_ddp_job(tmp_path / "job", Truth(iterations=6), status="partial")
    edit_info(tmp_path / "job", why="somebody stopped it")
    assert main(["report", str(tmp_path / "job")]) == 0
    assert "; partial: somebody stopped it\n" in capsys.readouterr().out
    text = " ".join(" ".join(page(tmp_path / "job").text).split())
    assert "partial partial" not in text


def test_a_job_without_iterations_or_cut_short_has_a_page(tmp_path):
    write_ddp_job(tmp_path / "job", Truth(iterations=6), status="partial")
    for folder in (tmp_path / "job").glob("nodes/*/steps"):
        shutil.rmtree(folder)
    assert main(["report", str(tmp_path / "job")]) == 0
    text = " ".join(page(tmp_path / "job").text)
    assert "This run is partial." in text
    assert "nothing to draw" in text
    assert not list((tmp_path / "job" / "report" / "figures").iterdir())
    info = json.loads((tmp_path / "job" / "run.json").read_text())
    ended = {"status": "failed", "why": "the job ended with exit code 1"}
    (tmp_path / "job" / "run.json").write_text(json.dumps(info | ended))
    assert main(["report", str(tmp_path / "job"), "--force"]) == 0
    text = " ".join(" ".join(page(tmp_path / "job").text).split())
    assert "This run failed. Reason: the job ended with exit code 1. The report covers" in text
    assert "The job failed before an iteration was recorded: the job ended with exit code 1." in text


def test_what_is_no_run_is_refused_in_one_sentence(tmp_path, capsys):
    write_sweep(tmp_path / "new", PAIRS[:1], loads_gbps=(0.0, 8.0), iterations=3)
    edit_info(tmp_path / "new", schema=2)
    for path, says in (
        (tmp_path / "none", "there is no"),
        (tmp_path, "run.json"),
        (tmp_path / "new", "upgrade"),
    ):
        assert main(["report", str(path)]) == 2
        captured = capsys.readouterr()
        assert says in captured.err
        assert captured.err.count("\n") == 1
    assert not (tmp_path / "new" / "report").exists()


def test_published_numbers_agree_with_the_model_profiles():
    for name, profile in PROFILES.items():
        assert profile.thesis_iteration_s == published_results.NO_LOAD_S[name]
    assert published_results.CONGESTION_POINTS["vgg16", "iperf"].data_mb == pytest.approx(
        (25 - 13.99) * 0.68 * 125, rel=0.01
    )
    # the published volume and coordinates of VGG under consistent and burst traffic agree within their digits
    for kind in ("consistent", "burst"):
        point = published_results.CONGESTION_POINTS["vgg16", kind]
        assert point.data_mb == pytest.approx((25 - point.bandwidth_gbps) * point.iteration_s * 125, rel=0.01)


@pytest.mark.skipif(not CHROMIUM, reason="there is no Chromium")
def test_figures_answer_to_the_keyboard_and_print_whole(reported, tmp_path):
    """The page in a browser: marks by arrow keys, names of all that takes the focus, a narrow page, and paper."""
    said = "document.getElementById('tip').hidden ? '' : document.getElementById('tip').textContent"
    # the page scrolls to what takes the focus, and the text of a mark with it
    frame = "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
    focus = f"document.querySelector('{{}}').focus(); {frame}"
    throughput = "#figure-throughput"

    def press(key):
        for kind in ("rawKeyDown", "keyUp"):
            browser.call("Input.dispatchKeyEvent", type=kind, key=key)

    with Browser(tmp_path / "profile") as browser:
        browser.call("Runtime.enable")
        browser.call("Emulation.setDeviceMetricsOverride", width=1200, height=900, deviceScaleFactor=1, mobile=False)
        browser.open((reported[0] / "report" / "report.html").as_uri())
        browser.wait("document.readyState === 'complete' && document.getElementById('tip') !== null")
        browser.value(focus.format("#figure-iteration-times svg"))
        press("ArrowRight")
        first = browser.value(said)
        press("ArrowRight")
        second = browser.value(said)
        press("ArrowLeft")
        assert browser.value(said) == first != second
        loads = [float(text.splitlines()[1].split()[0]) for text in (first, second)]
        assert loads == pytest.approx([load for _, load, _ in reported[1][:2]], abs=0.15)
        inside = "(({left, right, top}) => left >= 0 && right <= innerWidth && top >= 0)"
        assert browser.value(f"{inside}(document.getElementById('tip').getBoundingClientRect())")
        above = "document.getElementById('tip').getBoundingClientRect().top"
        top = browser.value(above)
        browser.value(f"scrollBy(0, 30); {frame}")
        assert browser.value(said) == first
        assert browser.value(above) == pytest.approx(top - 30, abs=1)
        press("Escape")
        assert browser.value(said) == ""

        # zoomed, arrows move the figure; paper has all of it, and what is folded
        home = "document.querySelector('#figure-iteration-times svg.figure').getAttribute('viewBox')"
        whole = browser.value(home)
        press("+")
        zoomed = browser.value(home)
        press("ArrowLeft")
        assert len({whole, zoomed, browser.value(home)}) == 3
        browser.value("document.querySelectorAll('details').forEach((part) => { part.open = false; }); 1")
        folded = "document.querySelectorAll('details:not([open])').length"
        browser.value(f"window.printed = []; addEventListener('beforeprint', () => printed.push({folded}))")
        browser.call("Page.printToPDF")
        assert browser.value("printed") == [0] and browser.value(home) == whole
        assert browser.value("document.querySelectorAll('details[open]').length") == 0

        # each panel takes the focus, and has its own marks
        browser.call("Emulation.setDeviceMetricsOverride", width=390, height=844, deviceScaleFactor=1, mobile=True)
        browser.value("document.activeElement.blur()")
        browser.value(focus.format(f"{throughput} svg.figure:nth-of-type(2)"))
        assert browser.value("document.activeElement.matches('svg.figure:nth-of-type(2)')")
        press("ArrowRight")
        assert browser.value(said).startswith("ResNet-50")
        assert browser.value(said) != ""
        for width in (390, 1200):
            browser.call(
                "Emulation.setDeviceMetricsOverride", width=width, height=844, deviceScaleFactor=1, mobile=False
            )
            tree = browser.call("Accessibility.getFullAXTree")["nodes"]
            shown = [node for node in tree if not node["ignored"] and node["role"]["value"] != "RootWebArea"]
            taking = [node for node in shown if {"focusable"} & {item["name"] for item in node.get("properties", ())}]
            assert all(node["name"]["value"] for node in taking if node["role"]["value"] != "StaticText")
            pictures = [node["name"]["value"] for node in shown if node["role"]["value"] == "image"]
            drawings = [name for name in pictures if len(name) > 60]  # the others are entries of legends
            named = browser.value("[...document.querySelectorAll('svg.figure')].map((one) => one.ariaLabel)")
            assert len(drawings) == len(set(drawings)) and set(drawings) <= set(named)  # those in sight
            assert len(named) == len(set(named)) > len(FIGURES)
        assert [event for event in browser.events if event["method"] == "Runtime.exceptionThrown"] == []


WIDTHS = {390: 844, 600: 900, 768: 1024, 1280: 800}
SMALLEST = """[...document.querySelectorAll("svg.figure, svg.key")].map((svg) => {
  const scale = svg.getBoundingClientRect().width / svg.viewBox.baseVal.width;
  const texts = [...svg.querySelectorAll("text")];
  return Math.min(...texts.map((text) => scale * parseFloat(getComputedStyle(text).fontSize)));
})"""
PLACES = """[...document.querySelectorAll("svg.figure")].map((svg) => {
  const {x, y, width, height} = svg.getBoundingClientRect();
  return [x + scrollX, y + scrollY, width, height];
})"""
# a sheet that is too narrow scrolls to the right, and to the left it cannot
CUT = """[...document.querySelectorAll("svg.figure")].filter((svg) => {
  const sheet = svg.closest(".sheet");
  return svg.getBoundingClientRect().left + sheet.scrollLeft < sheet.getBoundingClientRect().left;
}).map((svg) => svg.ariaLabel)"""
MISALIGNED = """[...document.querySelectorAll("table")].flatMap((table) => {
  const heads = [...table.querySelectorAll("thead tr:last-child th")];
  return [...table.querySelectorAll("tbody tr")].flatMap((row) => [...row.cells].every((cell) => cell.colSpan === 1)
    ? [...row.cells].filter((cell, at) => getComputedStyle(cell).textAlign !== getComputedStyle(heads[at]).textAlign)
        .map((cell) => `${table.parentNode.getAttribute("aria-label")}: ${cell.textContent}`) : []);
})"""


def every_page(folder, sweep):
    """Write a page of each kind, and return their paths."""
    write_ddp_job(folder / "small", Truth())
    sharing(folder / "sharing")
    for run in ("small", "sharing"):
        assert main(["report", str(folder / run)]) == 0
    assert main(["compare", str(sweep), "-o", str(folder / "compare.html")]) == 0
    pages = [folder / run / "report" / "report.html" for run in ("small", "sharing")]
    return [sweep / "report" / "report.html", folder / "compare.html", *pages]


@pytest.mark.skipif(not CHROMIUM, reason="there is no Chromium")
def test_every_figure_of_every_page_is_drawn_at_every_width(reported, tmp_path):
    """Pixels of each panel: curves in it, on telephones, tablets and screens; text that can be read; aligned heads."""
    frame = "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
    pages = every_page(tmp_path, reported[0])
    with Browser(tmp_path / "profile") as browser:
        for page, (width, height) in itertools.product(pages, WIDTHS.items()):
            size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": True}
            browser.call("Emulation.setDeviceMetricsOverride", **size)
            browser.open(page.as_uri())
            browser.wait(f"location.href === '{page.as_uri()}' && document.readyState === 'complete'")
            if page == pages[0] and width == 1280:
                top, tall = (browser.value(PLACES)[0][at] for at in (1, 3))
                assert top + tall <= height, "the first figure is on the first screen"
            # what is not in sight is laid out only when it is
            shown = "one.style.contentVisibility = 'visible'; one.style.overflow = 'visible'"
            browser.value(f"document.querySelectorAll('figure').forEach((one) => {{ {shown}; }})")
            browser.value(frame)
            assert browser.value("document.documentElement.scrollWidth") <= width
            assert min(browser.value(SMALLEST)) >= 10.99, (page, width)
            assert browser.value(MISALIGNED) == []
            assert browser.value(CUT) == []
            for x, y, wide, high in browser.value(PLACES):
                clip = {"x": x, "y": y, "width": min(wide, width - x), "height": high, "scale": 1}
                shot = browser.call("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)
                picture = image.imread(io.BytesIO(base64.b64decode(shot["data"])))[..., :3]
                # what is within the axes is darker than their grid
                tall, across = (round(share * one) for share, one in zip((0.75, 0.9), picture.shape[:2], strict=True))
                inside = picture[round(0.15 * picture.shape[0]) : tall, round(0.25 * picture.shape[1]) : across]
                assert (inside.min(axis=2) < 0.75).sum() > 20, (page, width, y)


@pytest.mark.skipif(not FIREFOX, reason="there is no Firefox")
def test_every_figure_of_every_page_is_drawn_by_firefox(reported, tmp_path):
    with Firefox(tmp_path / "profile") as firefox:
        for page, width in itertools.product(every_page(tmp_path, reported[0]), WIDTHS):
            firefox.open(page, width)
            shown = "one.style.contentVisibility = 'visible'; one.style.overflow = 'visible'"
            firefox.value(f"document.querySelectorAll('figure').forEach((one) => {{ {shown}; }})")
            assert firefox.value("return innerWidth") == width
            assert firefox.value("return document.documentElement.scrollWidth") <= width
            assert firefox.value(f"return {CUT}") == []
            pictures = firefox.pictures("svg.figure")
            assert pictures
            for number, png in enumerate(pictures):
                picture = image.imread(io.BytesIO(png))[..., :3]
                # axes, grid and texts are grey
                assert (np.ptp(picture, axis=2) > 0.25).sum() > 20, (page, width, number)
