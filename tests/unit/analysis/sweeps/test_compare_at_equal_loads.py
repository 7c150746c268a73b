import numpy as np
import pytest

from ringtap.analysis.report.inputs import of_table
from ringtap.analysis.statistics.two_sample import compare
from ringtap.analysis.sweeps.compare_at_equal_loads import at_load, compare_moved

pytestmark = pytest.mark.computes

HEAD = "model,traffic,bandwidth_gbps,iteration_s,count,std_s"


def test_a_load_between_points_far_apart_is_as_uncertain_as_the_curve_between_them(tmp_path):
    loads = (0.0, 5.0, 12.5, 19.0, 24.0)
    rows = [f"vgg16,iperf,{load},{0.2 * max(1.0, 5 / (25 - load))},400,0.0001" for load in loads]
    (tmp_path / "points.csv").write_text("\n".join([HEAD, *rows]) + "\n")
    (series,) = of_table(tmp_path / "points.csv", 25.0, 4).series
    found = at_load(series, 0.8)
    assert found.interval_s[0] < 0.2 < found.interval_s[1], "the curve bends at exactly this load"
    assert at_load(series, 0.97) == "no points of several iterations lie on both sides of that load"
    assert at_load(series, 0.35) == "no point of several iterations lies within 12 percentage points of that load"


def test_iterations_whose_move_is_uncertain_are_not_called_different(tmp_path):
    draw = np.random.default_rng(4)
    rows = [
        f"vgg16,{kind},{load},{0.1 * max(1.0, 8 / (25 - load)) * np.exp(scatter)}"
        for kind, loads in {"consistent": (0.0, 10.0, 14.0, 18.3, 23.0), "burst": (0.0, 10.0, 14.0, 21.6, 23.0)}.items()
        for load in loads
        for scatter in draw.normal(0, 0.001, 150)
    ]
    (tmp_path / "points.csv").write_text("\n".join(["model,traffic,bandwidth_gbps,iteration_s", *rows]) + "\n")
    first, second = (at_load(one, 0.8) for one in of_table(tmp_path / "points.csv", 25.0, 4).series)
    found = compare_moved(first, second, ("consistent", "burst"))
    assert found.median_ratio.low < 1 < found.median_ratio.high
    assert not next(test for test in found.tests if test.name == "location").is_beyond_chance
    assert compare(first.times_s, second.times_s).tests[1].is_beyond_chance, "the move is wrong by more than chance"
