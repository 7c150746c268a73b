"""Each wrong call of the public names is answered in one sentence: no traceback of another type, no empty answer."""

import tarfile
from pathlib import Path

import matplotlib as mpl
import pandas as pd
import pytest

import ringtap
from tests.gold.analysis_sweep import write_sweep

pytestmark = [pytest.mark.computes, pytest.mark.together]

ROOT = Path(__file__).resolve().parents[3]
EXAMPLES = ROOT / "examples"
WRONG = {
    "ringtap.open_job(5)": "the run is 5, not a path",
    "ringtap.open_job(None)": "the run is None, not a path",
    "ringtap.open_job('jbo')": "there is no jbo: did you mean 'job'",
    "ringtap.open_sweep('job')": "job is a job, not a sweep: ringtap analyze (open_job) reads it",
    "ringtap.open_job('measured')": "ringtap report (open_sweep) reads it",
    "ringtap.open_run(5)": "the run is 5, not a path",
    "ringtap.open_run('.')": ". is not a run directory: it has no run.json; sweep is one",
    "ringtap.open_job('job/nodes')": "it has no run.json; job is one",
    "ringtap.open_job('job/run.json')": "it has no run.json; job is one",
    "ringtap.open_job(CAPTURE)": "it is a file; ringtap flows reads captures",
    "ringtap.open_job('job', workers=3)": "workers is 3, not of type Executor",
    "ringtap.open_job('job', batch='x')": "the batch must be a whole number, not 'x'",
    "ringtap.open_job('job', output=5)": "the job's output is 5, not a path",
    "ringtap.open_job('job', target_accuracy='x')": "the target accuracy is 'x', not a number",
    "ringtap.open_sweep('measured', workers=3)": "workers is 3, not of type Executor",
    "ringtap.read_captures(5)": "a capture is 5, not a path",
    "ringtap.read_captures([])": "no capture was named",
    "ringtap.read_captures([None])": "a capture is None, not a path",
    "ringtap.read_captures('')": "an empty text names no capture",
    "ringtap.read_captures('nope.pcap')": "nope.pcap does not exist",
    "ringtap.read_captures(CAPTURE, 'tpc')": "the filter 'tpc' is not understood",
    "ringtap.read_captures(CAPTURE, 5)": "the filter is 5, not text",
    "ringtap.read_captures(CAPTURE, bin_s='x')": "a width of bins 'x' is not understood",
    "ringtap.read_captures(CAPTURE, bin_s=None)": "must be a number or text with a unit",
    "ringtap.read_captures('captured')": "captured is a directory without captures: 1 of 1 entry of captured left "
    "out: nodes is a directory; name a node's packets, for example captured/nodes/n0/packets",
    "ringtap.read_structure([])": "no capture was named",
    "ringtap.read_structure(CAPTURE, 5)": "the filter is 5, not text",
    "ringtap.read_structure(CAPTURE, bin_s='x')": "a width of bins 'x' is not understood",
    "ringtap.read_structure(5)": "a capture is 5, not a path",
    "ringtap.read_structure(CAPTURE, hosts={'S0': 'x'})": "host S0: 'x' is not an IP address",
    "ringtap.read_structure(CAPTURE, hosts=5)": "hosts is 5",
    "job.table(5)": "the name of a log is 5, not text",
    "job.table('hots')": "did you mean 'host'",
    "job.table('host', by='iter')": "did you mean 'iteration'",
    "job.slow('x')": "the factor is 'x', not a number",
    "job.slow(-1)": "a factor of -1 is not a positive number",
    "job.slow(float('nan'))": "a factor of nan",
    "job.to_parquet(5)": "the folder is 5, not a path",
    "sweep.job('vgg16-brust')": "did you mean 'vgg16-burst'",
    "sweep['vgg16-brust']": "did you mean 'vgg16-burst'",
    "sweep[5]": "no series 5",
    "ringtap.compare([], [1, 2])": "sample a: a list of at least",
    "ringtap.compare('a', [1, 2])": "sample a: the values of a sample must be numbers",
    "ringtap.demand(1.5, 2)": "parameters must be a whole number, not 1.5",
    "ringtap.demand('x', 2)": "model 'x' is unknown: the models with known tensors are",
    "ringtap.demand(5, 0)": "0 workers",
    "ringtap.utc(5)": "the table is 5, not a pandas DataFrame",
    "ringtap.utc(pd.DataFrame({'a': [1]}))": "no column of times to convert: it has a",
    "ringtap.CongestionModel(None)": "must be a number or text with a unit",
    "ringtap.CongestionModel('25gbti')": "did you mean 25gbit",
    "ringtap.CongestionModel('25gbit').fit([1, 2], [1])": "two lists of one length",
    "ringtap.CongestionModel('25gbit').fit([1, 2, 'x'], [1, 2, 3])": "load 'x' is not understood",
    "ringtap.CongestionModel('25gbit').fit([1, 2, pd.NA], [1, 2, 3])": "loads must be numbers",
    "ringtap.CongestionModel('25gbit').fit([1, 2, '3gbti'], [1, 2, 3])": "did you mean 3gbit",
    "ringtap.CongestionModel('25gbit', n='x')": "exponent 'x' is unknown",
    "ringtap.CongestionModel('25gbit', n=[1])": "the exponent is [1], not a number",
    "ringtap.CongestionModel('25gbit').fit(None, None)": "two lists of one length",
    "ringtap.find_curve_point([1, 2], [1, 2], '25gbti')": "did you mean 25gbit",
    "ringtap.find_curve_point([1, 2], [1, 2], 25, 5)": "the iterations are 5, not a list",
    "ringtap.find_curve_point([1, 2], [1, 2], 25, [[1, 2]])": "1 lists of iterations for 2 points",
    "ringtap.find_congestion_point([1, 2, 3, 4], [1, 2, 3, 'x'], 25)": "duration 'x' is not understood",
    "ringtap.find_congestion_point([1, 2], [1, 2], 25, [[1, 2]])": "1 lists of iterations for 2 points",
    "ringtap.find_curve_point([1, 2], [1], 25)": "two lists of one length",
    "ringtap.find_curve_point([1, 30], [1, 1], 25)": "a load of 30 Gbit/s is not below the capacity of 25 Gbit/s",
    "ringtap.find_congestion_point([1, 30], [1, 1], 25)": "a load of 30 Gbit/s is not below the capacity of 25 Gbit/s",
    "ringtap.find_congestion_point([1, -1], [1, 1], 25)": "loads must not be negative",
    "fit.band('x')": "load 'x' is not understood",
    "fit.band([])": "there is no load to predict at",
    "fit.band([1, 2], kind='curv')": "did you mean 'curve'",
    "fit.band([30])": "below the capacity of 25 Gbit/s",
    "fit.compare(5)": "the other fit is 5, not of type FitResult",
    "fit.load_for('x')": "the slowdown is 'x', not a number",
    "fit.load_for(0.5)": "a slowdown of 0.5 makes no sense",
    "fit.plot(ax=5)": "ax must be Matplotlib axes",
    "ringtap.FitResult.from_json('nope.json')": "nope.json cannot be read",
    "ringtap.FitResult.from_json({})": "is not the JSON that ringtap fit writes (it lacks 'bandwidth_gbps')",
    "ringtap.FitResult.from_json(5)": "the fit is 5, not a path",
    "ringtap.plot.cdf('x')": "must be numbers",
    "ringtap.plot.iteration_times(5)": "the job is 5, not of type Job: give the result of open_job",
    "ringtap.plot.timeline(job, 'x')": "has no iteration x",
    "ringtap.plot.timeline(5, 1)": "the job is 5, not of type Job",
    "ringtap.plot.matrix(5)": "the traffic is 5, not of type Traffic",
    "ringtap.plot.rates(5)": "the table is 5, not a pandas DataFrame",
    "ringtap.plot.fit(5)": "the fit is 5, not of type FitResult",
    "ringtap.write_report(5)": "the source of a report is 5, not a path",
    "ringtap.write_report('nope')": "there is no nope",
    "ringtap.write_report(job, capacity=25)": "capacity is for a table",
    "ringtap.write_report(POINTS, capacity='x')": "capacity 'x' is not understood",
    "ringtap.write_report(POINTS, workers=1)": "1 workers are too few",
    "ringtap.write_report(POINTS, 'job')": "job exists and is not empty",
    "ringtap.write_report(POINTS, 5)": "the folder is 5, not a path",
    "traffic.rates(bin_s=-1)": "-1 s is not a positive time",
    "traffic.rates(by='conversations')": "did you mean 'conversation'",
    "traffic.rates(what='bits')": "did you mean 'bytes'",
    "traffic.select(5)": "the filter is 5, not text",
    "traffic.packets(10**6, around=0, within='1s')": "there is no conversation 1000000",
    "traffic.packets(0, around='x', within='1s')": "'x' is not a time",
    "traffic.packets(0, around=0, within='x')": "a time span 'x' is not understood",
    "job.packets(10**6)": "has no iteration 1000000: the iterations are 0 to",
    "job.packets('x')": "has no iteration x",
    "job.packets(1)": "has no packets: ",
    "job.packets(1, 5)": "the filter is 5, not text",
    "sweep.packets('vgg16-brust', 1)": "did you mean 'vgg16-burst'",
    "sweep.packets('vgg16-burst', 99)": "has no point vgg16-burst:99",
    "traffic.matrix('payloads')": "did you mean 'payload'",
    "traffic.injection_rate(['x'])": "are not numbers of flows",
    "traffic.injection_rate([10**6])": "there is no flow 1000000",
    "traffic.injection_rate([0], window=-1)": "-1 bins is not possible",
}


@pytest.fixture(scope="module")
def names(tmp_path_factory):
    mpl.use("Agg")
    path = tmp_path_factory.mktemp("wrong")
    with tarfile.open(ROOT / "tests" / "gold" / "v0.1" / "runs.tar.xz") as archive:
        archive.extractall(path, filter="data")
    (path / "captured" / "nodes" / "n0" / "packets").mkdir(parents=True)
    (path / "captured" / "run.json").write_text("{}")
    write_sweep(path / "measured", [("vgg16", "burst")], loads_gbps=(0.0, 6.0, 10.0, 14.0, 18.0, 22.0))
    points = pd.read_csv(EXAMPLES / "points.csv")
    return {
        "folder": path,
        "ringtap": ringtap,
        "pd": pd,
        "CAPTURE": EXAMPLES / "ring.pcap.gz",
        "POINTS": EXAMPLES / "points.csv",
        "job": ringtap.open_job(path / "job"),
        "sweep": ringtap.open_sweep(path / "measured"),
        "traffic": ringtap.read_captures(EXAMPLES / "ring.pcap.gz", cache=False),
        "fit": ringtap.CongestionModel("25gbit").fit(points["bandwidth_gbps"], points["iteration_s"]),
    }


@pytest.mark.parametrize("call", WRONG)
def test_a_wrong_call_is_one_sentence(call, names, monkeypatch):
    monkeypatch.chdir(names["folder"])
    with pytest.raises(ringtap.RingtapError) as caught:
        eval(call, dict(names))
    assert WRONG[call] in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_has_no_answer_says_why(names):
    assert ringtap.find_curve_point([], [], 25).point is ringtap.find_congestion_point([], [], 25).point is None
    few = ringtap.find_curve_point([1, 2], [1, 2], "25gbit"), ringtap.find_congestion_point([1, 2], [1, 2], "25gbit")
    assert [found.point for found in few] == [None, None]
    assert repr(few[0]) == "<CurveResult: fewer than 5 different loads cannot place it>"
    assert repr(few[1]).startswith("<CongestionResult: the construction needs 4 loads, but has 2")


def test_results_say_what_they_are(names):
    assert repr(names["fit"]).startswith("<FitResult t = ")
    assert repr(names["fit"]).count("\n") == 0
    assert repr(names["sweep"]["vgg16-burst"]).startswith("<Series vgg16-burst: 6 points; R² ")
    assert repr(names["fit"].compare(names["fit"])).startswith("<FitComparison: No difference beyond chance")
    assert repr(ringtap.compare([1, 2, 3, 4, 5, 6], [2, 3, 4, 5, 6, 7])).startswith("<Comparison: b against a: ")
    found = ringtap.read_structure(names["CAPTURE"], cache=False, hosts={"S0": "10.77.0.1"})
    assert "Volume" in found._repr_html_()
    assert names["traffic"]._repr_html_().count("<tr") == 6, "a heading and five conversations"
    assert "AICc" in names["fit"]._repr_html_()
    assert repr(found) == "<Structure: ring of 10.77.0.2 > S0 > 10.77.0.3, 29 iterations of 71.6 ms on average (sure)>"
