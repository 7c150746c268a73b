import json
import re
import sys

import pytest

from ringtap.cli import main
from ringtap.core.installation import install_command

pytestmark = [pytest.mark.computes, pytest.mark.together]

CAPACITY = ["--capacity", "25gbit"]
VGG = "bandwidth_gbps,iteration_s\n0,0.365\n6.3,0.447\n10.3,0.533\n14.7,0.733\n17.6,1.003\n20.9,1.837\n"


@pytest.fixture
def points(tmp_path):
    path = tmp_path / "points.csv"
    path.write_text(VGG)
    return path


def one_line_error(capsys, arguments):
    assert main([str(argument) for argument in arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("ringtap: ")
    assert captured.err.count("\n") == 1
    return captured.err


def test_demand_in_words_and_as_json(capsys):
    assert main(["demand", "--params", "138357444", "--workers", "4", "--iteration", "370ms"]) == 0
    assert "830.1 MB" in capsys.readouterr().out
    assert main(["demand", "--params", "138,357,444", "--workers", "4", "--iteration", "370ms", "--json"]) == 0
    item = json.loads(capsys.readouterr().out)
    assert item["demand_mb"] == pytest.approx(830.1, abs=0.1)
    assert item["required_gbps"] == pytest.approx(17.95, abs=0.01)
    assert main(["demand", "--params", "138.357444e6", "--workers", "4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["parameters"] == 138_357_444
    assert main(["demand", "--params", "1e6", "--workers", "1e1"]) == 0
    assert "10 workers, 1,000,000 parameters" in capsys.readouterr().out
    assert main(["demand", "--params", "138.5M", "--workers", "4"]) == 0
    assert "4 workers, 138,500,000 parameters" in capsys.readouterr().out
    assert main(["demand", "--model", "VGG-16", "--workers", "4"]) == 0
    assert "4 workers, 138,357,544 parameters" in capsys.readouterr().out
    assert main(["demand", "--params", "1000", "--workers", "3", "--collective", "parameter-server", "--json"]) == 0
    item = json.loads(capsys.readouterr().out)
    assert (item["busiest_link_bytes"], item["required_gbps"]) == (12000, None)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--params 0 --workers 4", "parameters"),
        ("--params -3 --workers 4", "parameters"),
        ("--params many --workers 4", "whole number"),
        ("--params 1e30 --workers 4", "whole number"),
        ("--params 1.5 --workers 4", "whole number"),
        ("--params nan --workers 4", "whole number"),
        ("--params 10 --workers 0", "workers"),
        ("--params 10 --workers 1", "one worker"),
        ("--params 10 --workers 2.5", "whole number"),
        ("--params 10 --workers 4 --collective star", "star"),
        ("--params 10 --workers 4 --iteration 370", "number and a unit"),
        ("--params 10 --workers 4 --iteration 0s", "positive"),
        ("--params 10 --workers 4 --collective hierarchical --group 3", "groups"),
        ("--params 10 --workers 4 --group x", "whole number"),
    ],
)
def test_demand_refuses_bad_values_in_one_sentence(capsys, arguments, says):
    assert says in one_line_error(capsys, ["demand", *arguments.split()])


def test_fit_in_words_and_as_json(capsys, points):
    assert main(["fit", str(points), "--capacity", "25gbit", "-v"]) == 0
    text = capsys.readouterr().out
    assert "* n = 1/2" in text
    assert "Thesis's construction  14.7 Gbit/s, 733 ms" in text
    assert main(["fit", str(points), "--capacity", "25gbit", "--n", "0.5", "--json"]) == 0
    item = json.loads(capsys.readouterr().out)
    assert {"A", "B", "n", "capacity_gbps", "r2", "r2_log", "aicc", "stderr", "warnings"} <= item.keys()
    assert item["r2_log"] == pytest.approx(0.9957, abs=1e-3)
    assert item["congestion_point"]["data_mb"] == pytest.approx(10.3 * 0.733 * 125)
    assert main(["fit", str(points), *CAPACITY, "--n", "free", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["stderr"]["n"] > 0


def test_fit_of_a_range_names_it(capsys, points):
    assert main(["fit", str(points), *CAPACITY, "--max-load", "17gbit", "-v"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("With a capacity of 25 Gbit/s at loads up to 17 Gbit/s: t = ")
    assert "4 points up to 17 Gbit/s" in text
    assert "Thesis's construction  14.7 Gbit/s" in text, "of all points"


def test_fit_shows_its_intervals_and_the_congestion_point(capsys, points):
    assert main(["fit", str(points), *CAPACITY]) == 0
    answer = capsys.readouterr().out
    assert answer.count("\n") == 2
    assert main(["fit", str(points), *CAPACITY, "-v"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(answer)
    at, low, high = re.search(r"Congestion point  (\S+) Gbit/s \((\S+) to (\S+)\), ", text).groups()
    begins = re.match(
        r"With a capacity of 25 Gbit/s: t = 0\.1263·exp\(5\.507/\(25−BW\)\^0\.5\), R² 0\.994 "
        r"\(n = 1/2 has the least AICc of 1/2, 1, 2 and free\)\.\n"
        r"Congestion begins at (\S+) Gbit/s, (\d+) % of the capacity "
        r"\(95 % interval (\d+) to (\d+) %\)\. The thesis's construction gives 14\.7 Gbit/s\.\n\n",
        text,
    ).groups()
    assert float(begins[0]) == pytest.approx(float(at), abs=0.051)
    assert [int(share) for share in begins[1:]] == pytest.approx([4 * float(one) for one in (at, low, high)], abs=0.55)
    assert "95 % by bootstrap  A 0.1" in text
    assert main(["fit", str(points), *CAPACITY, "--json"]) == 0
    item = json.loads(capsys.readouterr().out)
    assert item["intervals"]["A"][0] < item["A"] < item["intervals"]["A"][1]
    assert item["curve_point"]["low_gbps"] < item["curve_point"]["bandwidth_gbps"] < item["curve_point"]["high_gbps"]
    assert main(["fit", str(points), *CAPACITY, "--bootstrap", "0", "--json"]) == 0
    assert "intervals" not in json.loads(capsys.readouterr().out)


def test_fit_weighs_by_a_column_and_holds_outliers_down(capsys, tmp_path):
    path = tmp_path / "spread.csv"
    rows = [line.split(",") for line in VGG.splitlines()[1:]]
    rows = [f"{load},{seconds},{0.1 * float(seconds)},25,{0.02 * float(seconds)}" for load, seconds in rows]
    path.write_text("bandwidth_gbps,iteration_s,std_s,count,error_s\n" + "\n".join(rows) + "\n")
    found = []
    for options in (["--weights", "std_s"], ["--weights", "error_s"], ["--robust"]):
        assert main(["fit", str(path), *CAPACITY, "--json", *options]) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert found[0]["weighted"]
    assert found[0]["B"] == pytest.approx(found[1]["B"])
    assert found[2]["robust"]
    assert not found[2]["weighted"]
    for change, says in (
        (("error_s", "other_s"), "no column error_s"),
        ((",25,", ",,"), "line 2: count is missing"),
        ((",25,", ",0,"), "line 2: count is 0"),
        (("0.0365", "-1"), "line 2: std_s is -1"),
    ):
        bad = tmp_path / "bad.csv"
        bad.write_text(path.read_text().replace(*change))
        column = "error_s" if "error_s" in change else "std_s"
        assert says in one_line_error(capsys, ["fit", bad, *CAPACITY, "--weights", column])


def test_fit_keeps_its_file_and_does_not_overwrite(capsys, tmp_path, points):
    path = tmp_path / "fit.json"
    assert main(["fit", str(points), *CAPACITY, "-o", str(path)]) == 0
    assert f"Wrote {path}\nNext: ringtap predict --fit {path}" in capsys.readouterr().out
    assert "exists" in one_line_error(capsys, ["fit", points, *CAPACITY, "-o", path])
    assert main(["fit", str(points), *CAPACITY, "-o", str(path), "--force", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(path.read_text())
    assert "cannot be written" in one_line_error(
        capsys, ["fit", points, *CAPACITY, "-o", tmp_path / "none" / "fit.json"]
    )


def test_fit_without_a_congestion_point_says_why(capsys, tmp_path):
    path = tmp_path / "flat.csv"
    path.write_text("bandwidth_gbps,iteration_s\n0,1\n5,1\n10,1\n15,1.01\n")
    assert main(["fit", str(path), *CAPACITY, "--json"]) == 0
    item = json.loads(capsys.readouterr().out)
    assert item["congestion_point"] is None
    assert any("does not rise" in text for text in item["warnings"])
    assert main(["fit", str(path), *CAPACITY, "-v"]) == 0
    text = capsys.readouterr().out
    assert "No congestion point: fewer than 5 different loads cannot place it" in text
    assert "No point by the thesis's construction: the iteration time does not rise" in text
    unknown = "It is not known where congestion begins, because fewer than 5 different loads cannot place it."
    assert text.splitlines()[1] == unknown
    path.write_text("bandwidth_gbps,iteration_s\n0,1\n5,1\n15,1.5\n20,3\n")
    assert main(["fit", str(path), *CAPACITY, "--bootstrap", "0"]) == 0
    _, second, *_ = capsys.readouterr().out.splitlines()
    assert second.startswith(unknown), "the measured point of the construction is no stand-in"
    assert second.removeprefix(unknown).startswith(" The thesis's construction gives ")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is empty: a header line with bandwidth_gbps, iteration_s is needed"),
        ("bandwidth_gbps,time\n0,1\n", "no column iteration_s"),
        ("bandwidth_gbps,iteration_s\n", "no points"),
        ("bandwidth_gbps,iteration_s\n0,1\nfive,1\n", "line 3: bandwidth_gbps is 'five'"),
        ("bandwidth_gbps,iteration_s\n0,nan\n", "line 2: iteration_s is nan"),
        ("bandwidth_gbps,iteration_s\ninf,1\n", "line 2: bandwidth_gbps is inf"),
        ("bandwidth_gbps,iteration_s\n-1,1\n", "line 2: bandwidth_gbps is -1"),
        ("bandwidth_gbps,iteration_s\n1,0\n", "line 2: iteration_s is 0"),
        ("bandwidth_gbps,iteration_s\n1,-2\n", "line 2: iteration_s is -2"),
        ("bandwidth_gbps,iteration_s\n1\n", "line 2: iteration_s is missing"),
        ("bandwidth_gbps,iteration_s\n25,1\n", "line 2: bandwidth_gbps is 25, not below"),
        ("bandwidth_gbps,iteration_s\n26,1\n", "line 2"),
        ("bandwidth_gbps,iteration_s\n0,1\n5,1\n9,2\n", "too few"),
        ("bandwidth_gbps,iteration_s\n0,1\n0,1\n9,2\n9,2\n", "too few"),
    ],
)
def test_fit_names_the_file_and_line_of_a_bad_point(capsys, tmp_path, text, says):
    path = tmp_path / "bad.csv"
    path.write_text(text)
    error = one_line_error(capsys, ["fit", path, *CAPACITY])
    assert says in error
    assert str(path) in error


def test_fit_accepts_any_order_other_columns_and_blank_lines(capsys, tmp_path, points):
    path = tmp_path / "other.csv"
    rows = [row.split(",") for row in VGG.splitlines()[1:]]
    lines = [f"x, {seconds} ,{load}" for load, seconds in reversed(rows)]
    path.write_text("\ufeffnote, iteration_s,bandwidth_gbps\n" + "\n\n".join(lines) + "\n", encoding="utf-8")
    assert main(["fit", str(path), *CAPACITY, "--json"]) == 0
    shuffled = json.loads(capsys.readouterr().out)
    assert main(["fit", str(points), *CAPACITY, "--json"]) == 0
    assert shuffled == json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--capacity", "25"], "capacity '25' has no unit: write a number and a unit (bit, "),
        (["--capacity", "fast"], "capacity 'fast' is not understood"),
        (["--capacity", "0gbit"], "positive"),
        (["--capacity", "20gbit"], "line 7"),
        (["--n", "3"], "--n"),
        (["--n", "any"], "--n"),
        (["--bootstrap", "5"], "--bootstrap"),
        (["--bootstrap", "many"], "whole number"),
        (["--weights", "std_s"], "no column std_s"),
        (["--max-load", "7"], "--max-load (max_load=) '7' has no unit"),
        (["--max-load", "28%"], "2 points at 2 loads up to 7 Gbit/s are too few"),
        (["--max-load", "7gbit"], "2 points at 2 loads up to 7 Gbit/s are too few"),
    ],
)
def test_fit_refuses_bad_options(capsys, points, options, says):
    assert says in one_line_error(capsys, ["fit", points, *CAPACITY, *options])


def test_no_capacity_is_assumed(capsys, points):
    assert one_line_error(capsys, ["fit", points]) == (
        f"ringtap: {points} does not say the capacity of the bottleneck: give --capacity RATE (capacity=), such as "
        "25gbit; ethtool NIC shows the speed of a link\n"
    )


def test_fit_of_files_that_cannot_be_read(capsys, tmp_path):
    assert "cannot be read" in one_line_error(capsys, ["fit", tmp_path / "none.csv"])
    assert "is not a run directory" in one_line_error(capsys, ["fit", tmp_path])
    other = {"plan.toml": "ringtap sweep measures plans", "x.pcap": "ringtap flows reads captures"}
    other |= {"t.parquet": "ringtap analyze reads tables of operations"}
    other |= {"job.0.et": "ringtap workload reads directories of execution traces"}
    other |= {"rank0.json.gz": "ringtap workload new --kineto reads traces of torch.profiler"}
    for name, words in (other | {"report.html": "a browser shows pages"}).items():
        (tmp_path / name).write_text("[sweep]\n")
        for verb in ("fit", "report"):
            said = one_line_error(capsys, [verb, tmp_path / name, *CAPACITY])
            assert f"{name} is no table: give a CSV file with " in said
            assert said.endswith(f"; {words}\n")
    (tmp_path / "run" / "report").mkdir(parents=True)
    (tmp_path / "run" / "points.jsonl").touch()
    (tmp_path / "run" / "report" / "points.csv").touch()
    said = one_line_error(capsys, ["fit", tmp_path / "run" / "report" / "points.csv", *CAPACITY])
    assert said.endswith(f"is the table of a report: ringtap fit {tmp_path / 'run'} reads its sweep\n")
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00\x01")
    assert "UTF-8" in one_line_error(capsys, ["fit", tmp_path / "binary.csv"])


def test_without_the_extra_the_sentence_says_what_to_install(capsys, monkeypatch, points):
    for name in ("fit", "fit_warnings", "fit_command", "congestion"):
        monkeypatch.delitem(sys.modules, f"ringtap.analysis.{name}", raising=False)
    monkeypatch.setitem(sys.modules, "numpy", None)
    assert f"numpy is not installed here: {install_command('report')}" in one_line_error(
        capsys, ["fit", points, *CAPACITY]
    )
