import re

import numpy as np
import pytest

from ringtap.analysis.report.findings import answer, findings, overview
from ringtap.analysis.report.inputs import of_table
from ringtap.analysis.report.load_statistics import compare_kinds, order_kinds, tails
from ringtap.analysis.statistics.two_sample import compare

pytestmark = pytest.mark.computes

LOADS = (0.0, 3.75, 7.5, 10.0, 12.5, 15.0, 17.5, 20.0, 21.5)
ENDS = ((0, "iperf"), (2, "burst web-search"))
HEAD = "model,traffic,bandwidth_gbps,iteration_s,count,std_s"


def rows_of(tmp_path, series, loads=LOADS):
    """Rows of a table of points; ``series`` gives the time at a load for each model and traffic."""
    rows = [
        f"{model},{traffic},{load},{curve(load)},400,0.002"
        for (model, traffic), curve in series.items()
        for load in loads
    ]
    (tmp_path / "points.csv").write_text("\n".join([HEAD, *rows]) + "\n")
    return overview(of_table(tmp_path / "points.csv", 25.0, 4).series)


def bent(load, at=15.0, base=0.2):
    """No slowdown below a load, inversely proportional to what is left above it, with a little scatter."""
    ripple = 1 + 0.002 * np.sin(7 * load)
    return base * ripple * max(1.0, (25 - at) / (25 - load))


def test_clear_congestion_of_one_series(tmp_path):
    (row,) = rows = rows_of(tmp_path, {("resnet50", "iperf"): bent})
    begins, (middle, heavy) = row["congestion"], row["slowdowns"]
    assert begins["share"] == pytest.approx(0.6, abs=0.03)
    assert begins["interval_share"][0] <= begins["share"] <= begins["interval_share"][1]
    assert middle["slowdown"] == pytest.approx(0, abs=0.01)
    assert heavy["slowdown"] == pytest.approx(1, abs=0.02)
    assert heavy["interval"][0] < heavy["slowdown"] < heavy["interval"][1]
    low, high = (round(100 * end) for end in begins["interval_share"])
    least, most = (round(100 * end) for end in heavy["interval"])
    assert answer(rows) == (
        f"Cross traffic (iperf) slows iterations of ResNet-50 by {100 * heavy['slowdown']:.0f} % "
        f"(95 % interval {least} to {most} %) at 80 % load; "
        f"congestion begins at {begins['bandwidth_gbps']:.3g} Gbit/s, {100 * begins['share']:.0f} % of the capacity "
        f"(95 % interval {low} to {high} %)."
    )


def test_no_congestion_is_said_with_its_reason(tmp_path):
    (row,) = rows = rows_of(tmp_path, {("resnet50", "iperf"): lambda load: 0.2 + 0.0001 * np.sin(9 * load)})
    assert row["congestion"]["share"] is None
    assert row["congestion"]["why"] == "the iteration time does not measurably grow with the load"
    said = answer(rows)
    assert "Cross traffic (iperf) does not measurably slow iterations of ResNet-50 at 80 % load" in said
    assert f"no congestion point was found, because {row['congestion']['why']}." in said


def test_several_series_give_a_range(tmp_path):
    curves = {("resnet50", "iperf"): bent, ("vgg16", "iperf"): lambda load: bent(load, 11.0, 0.4)}
    rows = rows_of(tmp_path, curves)
    said = answer(rows)
    small, large = sorted(round(100 * row["slowdowns"][-1]["slowdown"]) for row in rows)
    assert re.search(rf"by {small} % \(ResNet-50 under iperf, 95 %.* to {large} % \(VGG-16 under iperf, 95 %", said)
    first, last = sorted(round(100 * row["congestion"]["share"]) for row in rows)
    assert f"; congestion begins at {first} to {last} % of the capacity (95 % intervals from " in said
    curves["bert-large", "iperf"] = lambda load: 0.6 + 0.0001 * np.sin(9 * load)
    assert answer(rows_of(tmp_path, curves)).endswith(" %) in 2 of 3 series.")
    why = "no point without cross traffic was measured"
    for row in rows:
        row["slowdowns"][-1] |= {"slowdown": None, "interval": None, "why": why}
    said = answer(rows)
    assert said.startswith(f"The slowdown at 80 % load is not known, because {why}; there, an iteration takes ")
    assert re.search(r"takes 0\.\d+ s \(ResNet-50 under iperf\) to 1\.\d+ s \(VGG-16 under iperf\); ", said)


def test_a_series_without_fit_or_heavy_load_says_why(tmp_path):
    (row,) = rows = rows_of(tmp_path, {("resnet50", "iperf"): bent}, loads=(0.0, 7.5))
    assert "A" not in row["fit"]
    assert row["fit"]["why"]
    assert [item["slowdown"] for item in row["slowdowns"]] == [None, None]
    assert answer(rows).startswith(
        "The slowdown of ResNet-50 under cross traffic (iperf) at 80 % load is not known, because no point of several "
    )


def test_without_cross_traffic_the_headline_is_the_time_of_an_iteration(tmp_path):
    curves = {("resnet50", "iperf"): bent, ("vgg16", "iperf"): lambda load: bent(load, 11.0, 0.4)}
    rows = rows_of(tmp_path, curves, loads=(0.0,))
    assert [row["has_cross_traffic"] for row in rows] == [False, False]
    assert answer(rows) == ("Without cross traffic an iteration takes 0.200 s (ResNet-50) to 0.400 s (VGG-16).")
    del curves["vgg16", "iperf"]
    rows = rows_of(tmp_path, curves, loads=(0.0,))
    assert answer(rows) == "An iteration of ResNet-50 takes 0.200 s without cross traffic."
    rows = rows_of(tmp_path, curves, loads=(0.0, 7.5))
    assert rows[0]["has_cross_traffic"]


def test_a_series_without_a_point_alone_knows_no_slowdown(tmp_path):
    (row,) = rows_of(tmp_path, {("resnet50", "iperf"): bent}, loads=LOADS[1:])
    assert row["no_load_s"] is None
    assert {item["why"] for item in row["slowdowns"]} == {"no point without cross traffic was measured"}


def test_a_point_that_is_not_known_is_never_another_number(tmp_path):
    (row,) = rows = rows_of(tmp_path, {("resnet50", "iperf"): lambda load: bent(load, 12.5)}, (0.0, 5.0, 15.0, 20.0))
    assert (
        row["congestion"]["share"] is row["congestion"]["bandwidth_gbps"] is row["congestion"]["interval_share"] is None
    )
    assert row["congestion"]["why"] == "fewer than 5 different loads cannot place it"
    assert answer(rows).endswith(
        "; it is not known where congestion begins, because fewer than 5 different loads cannot place it."
    )
    assert answer([*rows, *rows]).endswith(
        "; no congestion point is known in any of 2 series: fewer than 5 different loads cannot place it."
    )


def test_nothing_measured_is_said():
    assert answer([]) == "No point was measured."


def test_series_are_compared_at_the_same_load_whatever_was_measured(tmp_path):
    """Points of three kinds at 76, 83 and 87 % of the capacity: at equal load, the order is the reverse."""
    curves = {"iperf": 4.0, "consistent": 4.3, "burst": 4.6}
    heaviest = {"iperf": 21.7, "consistent": 20.9, "burst": 19.05}

    def time_s(kind, load):
        return 0.1 * np.exp(curves[kind] / np.sqrt(25 - load))

    rows = [
        f"vgg16,{kind},{load},{time_s(kind, load)},400,{0.01 * time_s(kind, load)}"
        for kind in curves
        for load in (0.0, 5.0, 9.0, 12.0, 14.0, 16.0, heaviest[kind])
    ]
    (tmp_path / "points.csv").write_text("\n".join([HEAD, *rows]) + "\n")
    series = of_table(tmp_path / "points.csv", 25.0, 4).series
    found = overview(series)
    heavy = [row["slowdowns"][-1] for row in found]
    assert {item["share"] for item in heavy} == {19.05 / 25}, "the heaviest load that all of them reach"
    for row, item in zip(found, heavy, strict=True):
        truth = time_s(row["traffic"], 19.05) / time_s(row["traffic"], 0.0) - 1
        assert item["slowdown"] == pytest.approx(truth, rel=0.01)
        assert item["interval"][0] < truth < item["interval"][1]
    small, large = (
        f"{100 * heavy[at]['slowdown']:.0f} % (VGG-16 under {name}, 95 % interval "
        f"{100 * heavy[at]['interval'][0]:.0f} to {100 * heavy[at]['interval'][1]:.0f} %)"
        for at, name in ENDS
    )
    assert answer(found).startswith(f"Cross traffic at 76 % load slows iterations by {small} to {large}; ")
    assert [kind.traffic for kind in order_kinds(series)[-1].kinds] == ["iperf", "consistent", "burst"]


def test_iterations_are_compared_at_one_load(tmp_path):
    curves = {"consistent": 4.0, "burst": 4.4}  # burst slows more, but its point is at a lighter load
    draw = np.random.default_rng(3)
    loads = {"consistent": (0.0, 10.0, 15.0, 18.0, 20.8, 22.0), "burst": (0.0, 10.0, 15.0, 17.2, 19.3, 22.0)}
    rows = [
        f"vgg16,{kind},{load},{0.1 * np.exp(b / np.sqrt(25 - load) + scatter)}"
        for kind, b in curves.items()
        for load in loads[kind]
        for scatter in draw.normal(0, 0.03, 150)
    ]
    (tmp_path / "points.csv").write_text("\n".join(["model,traffic,bandwidth_gbps,iteration_s", *rows]) + "\n")
    series = of_table(tmp_path / "points.csv", 25.0, 4).series
    pair = compare_kinds(series)[-1]
    assert (pair.share, pair.bandwidth_gbps) == (0.8, (20.8, 19.3))
    ratio, truth = pair.result.median_ratio, np.exp((4.4 - 4.0) / np.sqrt(5))
    assert ratio.low < truth < ratio.high and ratio.low > 1
    assert any(test.is_beyond_chance for test in pair.result.tests)
    raw = compare(*(one.used[4].iteration_s for one in series))
    assert raw.median_ratio.high < 1, "the points themselves say the reverse"


ONE, TWO, THREE = (f"ResNet-50 under iperf at {load} Gbit/s" for load in ("0", "7.5", "15"))


@pytest.mark.parametrize(
    ("counts", "said"),
    [
        ((2, 5, 400, 400), f"{ONE} (2): its"),
        ((400, 4, 1, 400), f"{TWO} (4) and {THREE} (1): their"),
        ((2, 2, 2, 2), f"{ONE} (2), {TWO} (2), {THREE} (2) and 1 more: their"),
        ((5, 5, 5, 5), None),
    ],
)
def test_points_of_few_iterations_are_named(tmp_path, counts, said):
    rows = [f"resnet50,iperf,{7.5 * at},0.2,{count},0.01" for at, count in enumerate(counts)]
    (tmp_path / "points.csv").write_text("\n".join([HEAD, *rows]) + "\n")
    series = of_table(tmp_path / "points.csv", 25.0, 4).series
    statements = findings(series, overview(series), [tails(one, 0.8) for one in series], [], [])
    few = [one for one in statements if one.text.startswith("Few")]
    assert [one.text for one in few] == (
        [f"Few iterations were measured of {said} spread and percentiles say little."] if said else []
    )
    assert not any(one.firm for one in few)
