import json
import re
from pathlib import Path

import pytest

from ringtap.agents.sweep.sweep_estimate import estimate, layout, room_bytes
from ringtap.cli import main
from ringtap.core.errors import UsageError
from ringtap.core.sweep_plans.sweep_plan import Capture, load_plan, plan_from_keys

pytestmark = pytest.mark.computes

GOOD = """\
[sweep]
loads = [0, 0.3, 0.3]
traffic = ["burst"]

[[models]]
name = "vgg16"
"""


def plan_file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "plan.toml"
    path.write_text(text)
    return path


def test_defaults_are_the_scale_model_of_the_thesis(tmp_path: Path) -> None:
    plan = load_plan(plan_file(tmp_path, GOOD))
    assert plan.capacity_bps == 250_000_000
    assert plan.scale == 100
    assert plan.models[0].parameters == 138_357_544
    assert plan.models[0].layers is None, "the tensors of the model"
    assert (plan.models[0].bucket_bytes, plan.models[0].first_bucket_bytes) == (25 << 20, 1 << 20)
    assert plan.loads == (0, 0.3, 0.3)
    spec, roles = layout(plan)
    assert roles.workers == ("S0", "S1", "S3")
    assert (roles.cross_from, roles.cross_to) == ("S2", "S0")
    assert spec.congestion_control == "cubic"


def test_loads_and_models_may_be_written_as_elsewhere(tmp_path: Path) -> None:
    text = GOOD.replace("loads = [0, 0.3, 0.3]", 'loads = [0, "30%", "0.3", "7.5gbit"]\ncapture = ["7.5gbit"]')
    plan = load_plan(plan_file(tmp_path, text.replace('"vgg16"', '"VGG-16"')))
    assert plan.loads == (0, 0.3, 0.3, 0.3)
    assert plan.capture is not None
    assert plan.capture.loads == (0.3,)
    assert plan.models[0].name == "vgg16"
    for load, says in (
        ('"18"', "has no unit"),
        ('"26gbit"', "holds 26gbit: a load is below the capacity, which is 25 Gbit/s"),
        ("85", 'holds 85: a load is .* below 1; did you mean 0.85 or "85%"\\?'),
        ('"fast"', "loads is not understood"),
    ):
        with pytest.raises(UsageError, match=says):
            load_plan(plan_file(tmp_path, GOOD.replace("0.3, 0.3", load)))


def test_configuration_a_bottleneck_is_the_senders_uplink(tmp_path: Path) -> None:
    plan = load_plan(plan_file(tmp_path, GOOD + '\n[testbed]\nconfiguration = "A"\n'))
    roles = layout(plan)[1]
    assert len(roles.workers) == 4
    assert (roles.cross_from, roles.cross_to) == ("S0", "S3")
    assert roles.bottleneck()["total"] == [{"node": "switch", "nic": "to-S0", "direction": "rx"}]


def test_a_custom_testbed_and_an_own_model(tmp_path: Path) -> None:
    text = """\
[sweep]
scale = 50
capacity = "10gbit"
loads = [0.5]
[testbed]
configuration = "custom"
hosts = ["a", "b", "c", "d", "e"]
workers = ["a", "b"]
cross_from = "e"
cross_to = "a"
[[models]]
name = "mine"
parameters = 1000000
compute = "50ms"
layers = 4
bucket = "1MB"
"""
    plan = load_plan(plan_file(tmp_path, text))
    assert plan.capacity_bps == 200_000_000
    model = plan.models[0]
    # DDP begins with a smaller bucket only if it is asked for no size
    assert (model.compute_s, model.bucket_bytes, model.first_bucket_bytes) == (0.05, 1_000_000, 1_000_000)
    assert model.layers == 4
    assert layout(plan)[0].hosts == ("a", "b", "c", "d", "e")


def test_a_profile_has_equal_layers_on_request(tmp_path: Path) -> None:
    equal = GOOD.replace('name = "vgg16"', 'name = "vgg16"\nlayers = 16\nparameters = 100')
    model = load_plan(plan_file(tmp_path, equal)).models[0]
    assert (model.layers, model.parameters) == (16, 100)


def test_an_own_command_needs_only_its_parameter_count(tmp_path: Path) -> None:
    own = GOOD.replace('name = "vgg16"', 'name = "mine"\ncommand = ["python", "train.py"]\nparameters = 5')
    assert load_plan(plan_file(tmp_path, own)).models[0].command == ("python", "train.py")


def test_a_real_model_has_a_batch_and_full_size_gradients(tmp_path: Path) -> None:
    real = GOOD.replace("[sweep]", "[sweep]\nscale = 1").replace('name = "vgg16"', 'name = "vgg16"\njob = "real"')
    (model,) = load_plan(plan_file(tmp_path, real)).models
    assert (model.job, model.batch, model.parameters) == ("real", 64, 138_357_544)
    (model,) = load_plan(plan_file(tmp_path, real + "batch = 4\n")).models
    assert model.batch == 4


def test_the_batch_of_a_command_is_not_known_unless_given(tmp_path: Path) -> None:
    own = GOOD.replace('name = "vgg16"', 'name = "vgg16"\ncommand = ["python", "train.py"]')
    (model,) = load_plan(plan_file(tmp_path, own)).models
    assert (model.job, model.batch) == ("command", None)
    assert load_plan(plan_file(tmp_path, own + "batch = 32\n")).models[0].batch == 32
    (model,) = load_plan(plan_file(tmp_path, GOOD)).models
    assert (model.job, model.batch) == ("scale-model", 64)


@pytest.mark.parametrize(
    ("change", "to", "words"),
    [
        (
            'name = "vgg16"',
            'name = "vgg16"\njob = "rael"',
            "line 7: .*one of scale-model, real; did you mean real",
        ),
        ("[sweep]", "[sweep]\nseed = 2147483649", "line 2: sweep.seed = 2147483649 is not .* from 0 to 2147483648"),
        ('name = "vgg16"', 'name = "vgg16"\njob = "real"', "line 7: models.job = .real. needs scale = 1: .*at 1:100"),
        ('name = "vgg16"', 'name = "vgg16"\njob = "real"\nlayers = 3', "line 8: models.layers does not go with job"),
        ('name = "vgg16"', 'name = "vgg16"\njob = "real"\ncompute = "1s"', "line 8: models.compute does not go with"),
        ('name = "vgg16"', 'name = "vgg16"\njob = "real"\nparameters = 3', "line 8: models.parameters does not go"),
        (
            'name = "vgg16"',
            'name = "vgg16"\njob = "real"\ncommand = ["a"]',
            "line 7: models.job does not go with a command",
        ),
        (
            'name = "vgg16"',
            'name = "vgg19"\njob = "real"',
            "line 7: models.job = .real. is for bert-large, vgg16, .*as a command",
        ),
        ('name = "vgg16"', 'name = "vgg16"\nbatch = 0', "line 7: models.batch = 0 is not a whole number from 1"),
        ('name = "vgg16"', 'name = "vgg16"\nparameters = 5', "line 7: models.parameters needs layers too"),
        (
            'name = "vgg16"',
            'name = "own"\nparameters = 5\ncompute = "1s"',
            "models.layers is missing: own has no tensors",
        ),
        ("loads", "laods", "line 2: sweep.laods is not a key.*did you mean loads"),
        ('traffic = ["burst"]', 'traffic = ["brust"]', "line 3: .*did you mean burst"),
        ('traffic = ["burst"]', 'traffic = "burst"', "line 3: .*not a list of texts: write \\[.burst.\\]"),
        (
            'name = "vgg16"',
            'name = "own"\ncommand = "{python} train.py"',
            r'line 7: .*not a list of texts: write \["\{python\}", "train.py"\]',
        ),
        ('name = "vgg16"', 'name = "own"', "line 6: .*not a profile: take one of .*, or give parameters and compute"),
        ("[sweep]", "[sweep]\ncapacity = 25", 'line 2: .*= 25 is not a text: write a rate such as "25gbit"'),
        ("[[models]]", "[window]\nmin_time = 6\n[[models]]", 'line 6: .*= 6 is not a text: write a time such as "6s"'),
        ("[[models]]", "[testbed]\nqueue = 6\n[[models]]", 'line 6: .*is not a text: write a size such as "400kB"'),
        (
            "[[models]]",
            "[hosts]\n[hosts]\n[[models]]",
            r"not TOML: .*hosts.* twice .*; write \[\[hosts\]\] before each",
        ),
        ("[[models]]", "[model]", r"did you mean \[\[models\]\]\?"),
        ("[0, 0.3, 0.3]", "[0, 1.0]", "line 2: .*from 0 to below 1"),
        ("[0, 0.3, 0.3]", "[0, -0.1]", "line 2"),
        ("[0, 0.3, 0.3]", '[0, "a"]', "line 2"),
        ("[0, 0.3, 0.3]", "[]", "line 2"),
        ("[0, 0.3, 0.3]", "[nan]", "line 2"),
        ("[sweep]", "[sweep]\nscale = 0", "line 2: sweep.scale"),
        ("[sweep]", "[sweep]\nscale = true", "line 2: sweep.scale"),
        ("[sweep]", '[sweep]\ncapacity = "25 furlongs"', "line 2: sweep.capacity"),
        ("[sweep]", '[sweep]\nordre = "random"', "line 2: .*did you mean order"),
        ("[sweep]", '[sweep]\norder = "rnd"', "line 2: .*one of as-written, random"),
        ('"vgg16"', '"vgg61"', "line 6: .*did you mean .vgg16"),
        ('"vgg16"', '"a/b"', "line 6: .*plain name"),
        ('name = "vgg16"', 'name = "vgg16"\nparamters = 3', "line 7: .*did you mean parameters"),
        ('name = "vgg16"', 'name = "vgg16"\nparameters = 0', "line 7"),
        ("[[models]]", "[models]", "must be|not a table"),
        ("[[models]]", "[[modles]]", "did you mean \\[\\[models\\]\\]"),
        ("[sweep]", "[swep]", "sweep is missing|did you mean"),
        ("[sweep]", "[sweep", "not TOML"),
        ("[[models]]", '[window]\nmin_time = "9s"\nmax_time = "3s"\n[[models]]', "line 7: window.max_time"),
        ("[[models]]", "[window]\nmin_iterations = 1\n[[models]]", "line 6"),
        ("[[models]]", '[burst]\nlength = "4ms"\n[[models]]', "line 6: burst.length .*the whole period"),
        ("[[models]]", "[burst]\nhight = 2\n[[models]]", "line 6: .*did you mean height"),
        ("[[models]]", '[testbed]\nworkers = ["S0"]\n[[models]]', "custom"),
        ("[[models]]", '[testbed]\nconfiguration = "custom"\n[[models]]', "needs hosts"),
        ("[[models]]", '[testbed]\nconfiguration = "C"\n[[models]]', "line 6: .*one of A, B, custom"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(tmp_path: Path, change: str, to: str, words: str) -> None:
    assert change in GOOD
    path = plan_file(tmp_path, GOOD.replace(change, to, 1))
    with pytest.raises(UsageError, match=words) as caught:
        layout(load_plan(path))
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


def test_unknown_hosts_in_roles_are_named(tmp_path: Path) -> None:
    testbed = ["[testbed]", 'configuration = "custom"', 'hosts = ["a", "b"]', 'workers = ["a", "x"]']
    text = "\n".join([GOOD.strip(), *testbed, 'cross_from = "b"', 'cross_to = "a"'])
    with pytest.raises(UsageError, match=r"line 10: testbed\.workers names 'x'"):
        load_plan(plan_file(tmp_path, text))


def test_the_framework_is_ddp_unless_the_plan_says_otherwise(tmp_path: Path) -> None:
    assert {model.framework for model in load_plan(plan_file(tmp_path, GOOD)).models} == {"ddp"}
    plan = load_plan(plan_file(tmp_path, GOOD + 'framework = "horovod"\n'))
    assert plan.models[-1].framework == "horovod"
    assert plan.to_json()["models"][-1]["framework"] == "horovod"


@pytest.mark.parametrize("wrong", ["horovd", "Horovod", "hvd-horovod"])
def test_a_wrong_framework_is_refused_with_the_nearest(tmp_path: Path, wrong: str) -> None:
    text = GOOD + f'framework = "{wrong}"\n'
    with pytest.raises(
        UsageError, match=f"line {len(text.splitlines())}.*{wrong}.*one of ddp, horovod; did you mean horovod"
    ):
        load_plan(plan_file(tmp_path, text))


def test_a_missing_plan_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        load_plan(tmp_path / "nothing.toml")


def test_the_estimate_counts_every_point(tmp_path: Path) -> None:
    plan = load_plan(plan_file(tmp_path, GOOD))
    points = estimate(plan)
    assert [point["load"] for point in points] == [0, 0.3, 0.3]
    least_s = len(points) * (plan.window.settle_s + plan.window.min_s)
    assert sum(point["duration_s"] for point in points) >= least_s


def test_iperf_streams_are_a_number_or_found_by_the_sweep(tmp_path: Path) -> None:
    def streams(line: str) -> int | None:
        return load_plan(plan_file(tmp_path, GOOD.replace("loads =", f"{line}\nloads ="))).iperf_streams

    assert streams("") == 2
    assert streams("iperf_streams = 64") == 64
    assert streams('iperf_streams = "auto"') is None
    for wrong in ("0", "65", "true", '"many"', "1.5"):
        with pytest.raises(UsageError, match='is not a whole number from 1 to 64, or "auto"'):
            streams(f"iperf_streams = {wrong}")


AUTO = GOOD.replace("[0, 0.3, 0.3]", '"auto"')


def test_chosen_loads_have_a_first_pass_targets_and_a_budget(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = plan_file(tmp_path, AUTO)
    plan = load_plan(path)
    assert plan.loads == (0, 0.51, 0.76, 0.88)
    assert plan.auto is not None
    assert (plan.auto.target_interval_gbps, plan.auto.target_mean, plan.auto.budget_s) == (1, 0.05, 1200)
    assert (plan.window.min_s, plan.window.min_iterations, plan.window.max_s) == (4, 10, 10)
    own = 'budget = "5min"\ntarget_interval = "500mbit"\ntarget_mean = 0.1'
    path.write_text(AUTO.replace('loads = "auto"', f'loads = "auto"\n{own}') + '[window]\nmax_time = "20s"\n')
    assert main(["sweep", str(path), "--dry-run", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {key: found[key] for key in ("mode", "first_loads", "target_interval_gbps", "target_mean", "budget_s")} == {
        "mode": "auto",
        "first_loads": [0, 0.51, 0.76, 0.88],
        "target_interval_gbps": 0.5,
        "target_mean": 0.1,
        "budget_s": 300,
    }
    assert [point["load"] for point in found["points"]] == found["first_loads"]
    # the whole budget, and what comes before the first window
    assert 300 < found["duration_s"] < 340
    assert main(["sweep", str(path), "--dry-run"]) == 0
    said = capsys.readouterr().out.splitlines()[-1]
    assert "until the congestion point is known to ±0.5 Gbit/s and each mean to 10 %, for at most 5 min 00 s" in said
    path.write_text(GOOD)
    assert main(["sweep", str(path), "--dry-run", "--json"]) == 0
    assert "mode" not in json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('order = "random"', "sweep.order has no meaning with loads"),
        ('budget = "20s"', "sweep.budget = 20 s is too short for the first pass of 4 loads"),
        ('target_interval = "0bit"', "sweep.target_interval is 0"),
        ("target_mean = 2", "sweep.target_mean = 2 is not a number from 0.001 to 1"),
        ('loads = "atuo"', 'is not a list of loads, such as 0.8, "80%" or "10gbit", or "auto"'),
        ('loads = [0, 0.5]\nbudget = "5min"', 'sweep.budget is for loads = "auto"'),
    ],
)
def test_keys_that_do_not_go_with_chosen_loads_are_one_sentence(tmp_path: Path, line: str, says: str) -> None:
    text = AUTO.replace('loads = "auto"', line if line.startswith("loads") else f'loads = "auto"\n{line}')
    with pytest.raises(UsageError, match=re.escape(says)):
        load_plan(plan_file(tmp_path, text))


CAPTURED = GOOD.replace('traffic = ["burst"]', 'traffic = ["burst"]\ncapture = [0.3]')


def test_a_plan_records_packets_at_some_of_its_loads(tmp_path: Path) -> None:
    assert load_plan(plan_file(tmp_path, GOOD)).capture is None
    text = CAPTURED + '\n[capture]\niterations = 4\nmax_bytes = "2MB"\n'
    capture = load_plan(plan_file(tmp_path, text)).capture
    assert capture == Capture((0.3,), 4, 2_000_000)
    keys = {"loads": [0, 0.3], "models": ["vgg16"]}
    assert plan_from_keys(keys | {"capture": [0.3]}).capture == Capture((0.3,))
    assert plan_from_keys(keys | {"capture": {"loads": [0.3], "iterations": 4, "max_bytes": 2e6}}).capture == capture


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("[0.3]", "[0.3, 0.35]", "line 4: sweep.capture holds 0.35, which is not among the loads; the nearest is 0.3"),
        ("[0.3]", "0.3", "sweep.capture = 0.3 is not a list of loads of the plan"),
        ("capture = [0.3]\n", "[capture]\niterations = 3\n", "line 5: capture.iterations needs loads to record"),
        ("[0.3]", "[0.3]\n[capture]\niteration = 3", "capture.iteration is not a key .* did you mean iterations"),
    ],
)
def test_a_capture_that_cannot_be_is_refused(tmp_path: Path, old: str, new: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        load_plan(plan_file(tmp_path, CAPTURED.replace(old, new, 1)))


def test_packets_count_in_time_and_room(tmp_path: Path) -> None:
    without = load_plan(plan_file(tmp_path, GOOD))
    plan = load_plan(plan_file(tmp_path, CAPTURED))
    points = estimate(plan)
    assert [point["packets_bytes"] > 0 for point in points] == [False, True, True]
    # three nodes' and the switch's, of ten iterations: 7.38 MB each way in an iteration, 144 B of a packet of 1500 B
    iterations_bytes = 4 * 10 * 2 * 7_379_069 * 144 / 1500
    assert iterations_bytes < points[1]["packets_bytes"] < 10 * iterations_bytes
    assert room_bytes(plan) - room_bytes(without) > 2 * points[1]["packets_bytes"] // 4
    assert sum(point["duration_s"] for point in points) > sum(point["duration_s"] for point in estimate(without)) + 6
    few = load_plan(plan_file(tmp_path, CAPTURED + '\n[capture]\nmax_bytes = "1kB"\n'))
    assert [point["packets_bytes"] for point in estimate(few)] == [0, 4000, 4000]


JOBS = """\
[sweep]
offsets = ["free", "0ms", "cassini"]

[[jobs]]
name = "a"
model = "vgg16"
compute = "300ms"
workers = ["S0", "S1"]

[[jobs]]
name = "b"
model = "resnet50"
workers = ["S1", "S2"]
"""


def test_jobs_share_the_links_of_their_hosts(tmp_path: Path) -> None:
    plan = load_plan(plan_file(tmp_path, JOBS))
    assert [(job.name, job.model.name, job.workers) for job in plan.jobs] == [
        ("a", "vgg16", ("S0", "S1")),
        ("b", "resnet50", ("S1", "S2")),
    ]
    assert plan.offsets == ("free", (0.0, 0.0), "cassini")
    assert layout(plan)[0].hosts == ("S0", "S1", "S2")
    points = [point["series"] for point in estimate(plan)]
    assert points == ["a alone", "b alone", "free", "0ms", "cassini"]
    third = '\n[[jobs]]\nname = "c"\nmodel = "vgg16"\nworkers = ["S0", "S1"]\n'
    three = load_plan(plan_file(tmp_path, JOBS.replace('"0ms"', '["0ms", "50ms"]') + third))
    assert three.offsets[1] == (0.0, 0.0, 0.05)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (JOBS[JOBS.index('[[jobs]]\nname = "b"') :], "", "1 [[jobs]]: give 2 to 6 that share a link"),
        ('["S1", "S2"]', '["S2", "S3"]', "a has no host in common with another job, so they share no link"),
        ('["S1", "S2"]', '["S1"]', "workers must be two hosts at least"),
        (
            '["S1", "S2"]\n',
            '["S1", "S2"]\n\n[testbed]\nhosts = ["S0", "S1"]\n',
            "hosts lacks S2, which is a worker of b",
        ),
        ('name = "b"', 'name = "a"', "two jobs are named a"),
        ('"resnet50"', '"resnet"', "did you mean 'resnet50'"),
        ('"0ms"', '"soon"', "offsets holds 'soon', which is not understood"),
        ('"0ms"', "50", "is not a list in which each offset is"),
        ('"0ms"', '["0ms", "0ms"]', 'a duration such as "50ms"'),
        ("offsets", "offset", "did you mean offsets?"),
        ("[[jobs]]", '[[models]]\nname = "vgg16"\n\n[[jobs]]', "a plan with [[jobs]] has no [models]: take it out"),
        ("[[jobs]]", '[[hosts]]\nname = "S0"\n\n[[jobs]]', "has no [hosts]: add [cluster], which says how to reach"),
    ],
)
def test_jobs_that_cannot_be_are_refused(tmp_path: Path, old: str, new: str, said: str) -> None:
    with pytest.raises(UsageError, match=re.escape(said)):
        load_plan(plan_file(tmp_path, JOBS.replace(old, new, 1)))


def test_seven_jobs_are_too_many(tmp_path: Path) -> None:
    more = "".join(f'\n[[jobs]]\nname = "{name}"\nmodel = "vgg16"\nworkers = ["S0", "S1"]\n' for name in "cdefg")
    with pytest.raises(UsageError, match=re.escape("7 [[jobs]]: give 2 to 6")):
        load_plan(plan_file(tmp_path, JOBS + more))
