import numpy as np
import pytest

from ringtap.analysis.sweeps.points_csv import read_table
from ringtap.core.errors import UsageError

pytestmark = pytest.mark.shares

HEAD = "model,traffic,bandwidth_gbps,iteration_s\n"
LOADS = (0.0, 5.0, 10.0, 15.0, 18.0, 20.0, 22.0)


def write(tmp_path, text):
    path = tmp_path / "table.csv"
    path.write_text(text)
    return path


def curve(load, B=3.3):
    return 0.08 * np.exp(B / np.sqrt(25 - load))


def test_rows_of_one_load_are_the_iterations_of_a_point(tmp_path):
    draw = np.random.default_rng(1)
    times = {load: curve(load) * np.exp(draw.normal(0, 0.02, 40)) for load in LOADS}
    rows = "".join(f"ResNet-50,Burst,{load},{seconds!r}\n" for load in LOADS for seconds in times[load].tolist())
    table = read_table(write(tmp_path, HEAD + rows), 25.0, 3)
    (one,) = table.series
    assert (one.name, one.title, one.traffic, one.demand.parameters) == (
        "resnet50-burst",
        "ResNet-50",
        "burst",
        25_557_032,
    )
    assert (table.rows, table.by_iteration) == (280, True)
    assert [point.cross_gbps for point in one.points] == list(LOADS)
    for point in one.points:
        assert point.iteration_s.tolist() == times[point.cross_gbps].tolist()  # in the file's order, that of time
        assert point.iterations == 40
        assert point.p99_s == pytest.approx(np.percentile(times[point.cross_gbps], 99))
    slope = one.fit.candidates[0].B
    assert slope == pytest.approx(3.3, rel=0.05)


def test_a_row_a_point_keeps_what_it_says_and_nothing_else(tmp_path):
    head = "traffic, model, transport, bandwidth_gbps, iteration_s, count, std_s, p99_s, workers, parameters, note\n"
    rows = [f"x,mine,{how},{load},{curve(load)},120,0.01,{2 * curve(load)},4,1000000,hello\n" for how in ("RDMA", "TCP")
            for load in (*LOADS, 5.0)]  # fmt: skip
    table = read_table(write(tmp_path, "\ufeff" + head + "".join(rows) + "\n,,\n"), 25.0)
    assert [one.name for one in table.series] == ["mine-x-RDMA", "mine-x-TCP"]
    assert (table.by_iteration, table.ignored) == (False, ("note",))
    one = table.series[0]
    assert (one.demand.workers, one.demand.parameters) == (4, 1_000_000)
    assert len(one.points) == 8  # a load that comes twice is a replicate
    point = one.points[0]
    assert (point.iterations, point.std_s, point.median_s, point.p99_low_s, len(point.iteration_s)) == (
        120, 0.01, None, None, 0,
    )  # fmt: skip
    assert point.p99_s == pytest.approx(2 * point.mean_s)
    assert point.variation == pytest.approx(0.01 / point.mean_s)


def test_means_alone_have_no_count(tmp_path):
    rows = "".join(f"vgg16,iperf,{load},{curve(load)}\n" for load in LOADS)
    table = read_table(write(tmp_path, HEAD + rows), 25.0, 4)
    assert not table.by_iteration
    assert {(point.iterations, point.p99_s) for point in table.series[0].points} == {(None, None)}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is empty"),
        (HEAD, "no rows below"),
        ("model,traffic,bandwidth_gbps\n", "line 1 has no column iteration_s"),
        ("model,model,traffic,bandwidth_gbps,iteration_s\n", "column model twice"),
        (HEAD + "vgg16,iperf,0,0.4\nvgg16,iperf,1\n", "line 3: iteration_s is missing"),
        (HEAD + ",iperf,0,0.4\n", "line 2: model is missing"),
        (HEAD + "vgg16,iperf,0,fast\n", "line 2: iteration_s is 'fast', not a number"),
        (HEAD + "vgg16,iperf,nan,1\n", "bandwidth_gbps is nan, not a finite number"),
        (HEAD + "vgg16,iperf,0,0\n", "iteration_s is 0"),
        (HEAD + "vgg16,iperf,-1,1\n", "bandwidth_gbps is -1; a load cannot be negative"),
        (HEAD + "vgg16,iperf,25,1\n", "line 2: bandwidth_gbps is 25, not below the capacity of 25"),
        (HEAD + "\n\nmine,iperf,0,1\n", "line 4: model 'mine' is not one of bert-large"),
        (HEAD.replace("\n", ",count\n") + "vgg16,iperf,0,1,2.5\n", "line 2: count is 2.5, not a whole number"),
        (HEAD.replace("\n", ",workers\n") + "vgg16,iperf,0,1,3\nvgg16,iperf,1,1,4\n", "line 3: workers differs from"),
        (HEAD.replace("\n", ",workers\n") + "vgg16,iperf,0,1,1\n", "workers is 1, below 2"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_names_the_line(tmp_path, text, says):
    path = write(tmp_path, text)
    with pytest.raises(UsageError, match=says.replace("(", r"\(")) as caught:
        read_table(path, 25.0, None if "workers" in text else 3)
    assert str(path) in str(caught.value)


def test_the_number_of_workers_must_be_known(tmp_path):
    with pytest.raises(UsageError, match="--workers N, or add a column workers"):
        read_table(write(tmp_path, HEAD + "vgg16,iperf,0,1\n"), 25.0)


def test_files_that_are_no_text_are_refused(tmp_path):
    path = tmp_path / "table.csv"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="not UTF-8"):
        read_table(path, 25.0, 3)
    with pytest.raises(UsageError, match="No such file"):
        read_table(tmp_path / "none.csv", 25.0, 3)
