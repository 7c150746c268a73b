import csv
import json
import re
from html.parser import HTMLParser

import pytest

from ringtap.analysis import thesis
from ringtap.cli import main
from ringtap.models import PROFILES
from tests.gold.analysis_sweep import edit_info, write_job, write_sweep

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
        self.links, self.tags, self.text = [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.links += [value for name, value in attrs if name in ("src", "href", "srcset", "data", "action")]

    def handle_data(self, data):
        self.text.append(data)


def page(path):
    parsed = Resources()
    parsed.feed((path / "report" / "report.html").read_text())
    return parsed


def test_the_page_needs_nothing_else(reported):
    parsed = page(reported[0])
    assert all(link.startswith(("#", "data:")) for link in parsed.links)
    assert sum(link.startswith("data:image/svg+xml") for link in parsed.links) == 5
    assert not {"script", "link", "iframe"} & set(parsed.tags)
    raw = (reported[0] / "report" / "report.html").read_text()
    assert "url(" not in raw
    assert "@import" not in raw
    assert not re.search(r"\b(nan|NaN|None|inf)\b", " ".join(parsed.text))


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
    assert main(["report", str(reported[0]), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == reported[2]
    after = {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert after == before


def test_the_terminal_names_the_files(reported, capsys):
    assert main(["report", str(reported[0])]) == 0
    out = capsys.readouterr().out
    assert f"Wrote {reported[0] / 'report' / 'report.html'}" in out
    assert "made-up: complete" in out


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
    assert main(["report", str(path)]) == 0
    data = json.loads((path / "report" / "report.json").read_text())
    (tails,) = (item for item in data["checks"] if item["expected"].startswith("burst traffic spreads"))
    assert (tails["subject"], tails["ok"]) == ("vgg16-burst", heavier == "burst")
    assert "over 4 loads" in tails["found"]  # 12.5 Gbit/s and above


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
    assert all(point["cross_bps"] is None for point in burst["points"])
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


def test_a_terse_run_description_is_enough(tmp_path):
    path = tmp_path / "sweep"
    write_sweep(path, PAIRS[:1], loads_gbps=(0.0, 8.0, 14.0), iterations=6)
    info = json.loads((path / "run.json").read_text())
    plan = {key: info["plan"][key] for key in ("scale", "capacity_bps", "models")} | {"topology": {}}
    edit_info(path, plan=plan, precheck=[{"kind": "consistent", "share_of_capacity": None}], not_collected=None, lab={})
    assert main(["report", str(path)]) == 0
    data = json.loads((path / "report" / "report.json").read_text())
    assert data["series"][0]["workers"] == 3  # counted from the ranks that left steps
    assert data["checks"][0]["ok"] is None
    assert "Everything that was asked for was recorded" in " ".join(page(path).text)


def test_what_is_no_sweep_is_refused_in_one_sentence(tmp_path, capsys):
    write_job(tmp_path / "job", [0.2], [(2.0, 0.0, 1e6)])
    write_sweep(tmp_path / "new", PAIRS[:1], loads_gbps=(0.0, 8.0), iterations=3)
    edit_info(tmp_path / "new", schema=2)
    for path, says in (
        (tmp_path / "job", "single job"),
        (tmp_path / "none", "run.json"),
        (tmp_path / "new", "upgrade"),
    ):
        assert main(["report", str(path)]) == 2
        captured = capsys.readouterr()
        assert says in captured.err
        assert captured.err.count("\n") == 1
    assert not (tmp_path / "new" / "report").exists()


def test_published_numbers_agree_with_the_model_profiles():
    for name, profile in PROFILES.items():
        assert profile.thesis_iteration_s == thesis.NO_LOAD_S[name]
    assert thesis.CONGESTION_POINTS["vgg16", "iperf"].data_mb == pytest.approx((25 - 13.99) * 0.68 * 125, rel=0.01)
    # the published volume and coordinates of VGG under consistent and burst traffic agree within their digits
    for kind in ("consistent", "burst"):
        point = thesis.CONGESTION_POINTS["vgg16", kind]
        assert point.data_mb == pytest.approx((25 - point.bandwidth_gbps) * point.iteration_s * 125, rel=0.01)
