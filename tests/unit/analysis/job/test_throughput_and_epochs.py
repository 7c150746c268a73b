"""Samples/s of a job and of a sweep's points, and the epochs that jobs print, against what is known of them."""

import json
import re

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ringtap
from ringtap.analysis.job.throughput_and_epochs import Given, Printed, parse_output, throughput
from ringtap.cli import main
from tests.gold.analysis_sweep import edit_info, write_sweep
from tests.gold.job_run import Truth, write_ddp_job

pytestmark = [pytest.mark.computes, pytest.mark.long, pytest.mark.together]

# the Wide-ResNet job of the third biweekly update, as its log was wrapped
STUDENT = """\
Epoch = 1: Cumulative Time = 81.000, Epoch Time = 81.000, Images/sec =
740.742431640625, Validation Loss = 0.354, Validation Accuracy = 0.878
Communication Time (all_reduce): 0.006016 seconds
Epoch = 2: Cumulative Time = 159.930, Epoch Time = 78.931, Images/sec =
760.1616821289062, Validation Loss = 0.249, Validation Accuracy = 0.910
Communication Time (all_reduce): 0.007944 seconds
Early stopping after epoch 2
"""
# Keras 3 on a terminal: colours, and updates of the bar that replace each other
KERAS = (
    "Epoch 1/2\n"
    "\x1b[1m   1/1875\x1b[0m \x1b[37m━━━━━\x1b[0m \x1b[1m6:02\x1b[0m 194ms/step - accuracy: 0.0312 - loss: 2.4152"
    + "\b"
    * 40
    + "\r\x1b[1m1875/1875\x1b[0m \x1b[32m━━━━━\x1b[0m\x1b[37m\x1b[0m \x1b[1m3s\x1b[0m 1ms/step - accuracy: 0.8589 - "
    "loss: 0.4796\r\x1b[1m1875/1875\x1b[0m \x1b[32m━━━━━\x1b[0m \x1b[1m3s\x1b[0m 1ms/step - accuracy: 0.8590 - loss: "
    "0.4795 - val_accuracy: 0.9500 - val_loss: 0.1500\n"
    "Epoch 2/2\n"
    "1875/1875 - 3s - 1ms/step - accuracy: 0.9600 - loss: 0.1400 - val_accuracy: 0.9700 - val_loss: 0.1000\n"
    "313/313 - 0s - 1ms/step - accuracy: 0.9770 - loss: 0.0740\n"
    "Test accuracy: 0.977\n"
)


def columns(text, *names):
    return [tuple(epoch[name] for name in ("epoch", *names)) for epoch in parse_output(text).epochs]


def test_the_students_lines_are_read_as_they_were_wrapped():
    names = ("cumulative_s", "epoch_s", "samples_per_s", "validation_loss", "validation_accuracy", "loss", "accuracy")
    assert columns(STUDENT, *names) == [
        (1, 81.0, 81.0, 740.742431640625, 0.354, 0.878, None, None),
        (2, 159.93, 78.931, 760.1616821289062, 0.249, 0.91, None, None),
    ]


def test_epochs_of_keras_are_the_ends_of_its_bars():
    names = ("loss", "accuracy", "validation_loss", "validation_accuracy", "epoch_s")
    first, second = columns(KERAS, *names)
    assert first in ((1, 0.4796, 0.8589, 0.15, 0.95, None), (1, 0.4795, 0.859, 0.15, 0.95, None))
    assert second == (2, 0.14, 0.96, 0.1, 0.97, None)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Epoch [3/10], Loss: 0.1234, Accuracy: 91.20%\n", [(3, 0.1234, pytest.approx(0.912))]),
        ("[0]<stdout>:Epoch 3: train_loss=1.5e-1 train acc = 0.5\n", [(3, 0.15, 0.5)]),
        ("epoch 7/9 12.3s loss: 0.11 acc: 92.5\n", [(7, 0.11, None)]),  # of 1 or of 100, nothing says
        ("Epoch [1/5], Step [100/600], Loss: 0.5\nEpoch [1/5], Step [600/600], Loss: 0.25\n", [(1, 0.25, None)]),
        ("Epoch 1: loss = 0.5\nEpoch 1: loss = 0.6\n", [(1, 0.5, None)]),
        # the value after the epoch, of something else or within the epoch
        ("Epoch 1: loss = 0.5\nAccuracy: 0.9\n", [(1, 0.5, None)]),
        ("Epoch 1: average loss = 0.5, test accuracy: 0.5\n", []),
        ("Train Epoch: 1 [640/60000 (1%)]\tLoss: 2.300039\n\nTest set: Accuracy: 9905/10000 (99%)\n", []),
        ("Epoch: [0][  10/5005]\tTime  0.5 ( 0.6)\tLoss 6.9e+00 (7.0e+00)\tAcc@1   0.00\n", []),
        ("Early stopping after epoch 2\nEpochs: 5\nloss: 3\n", [(2, 3.0, None)]),
        ("loss: 3, epoch time: 5\n", []),
        ("Epoch 1: loss = nan, accuracy = 0.5\n", [(1, None, 0.5)]),
    ],
)
def test_other_forms(text, expected):
    assert columns(text, "loss", "accuracy") == expected


_epochs = st.lists(
    st.tuples(st.floats(0.01, 1e4), st.floats(0.01, 1e5), st.floats(0, 100), st.floats(0, 1)), min_size=1, max_size=8
)


@given(_epochs, st.integers(60, 200), st.data())
def test_lines_are_read_however_they_are_wrapped_after_a_sign(epochs, width, data):
    lines, cumulative_s = [], 0.0
    for number, (epoch_s, rate, loss, accuracy) in enumerate(epochs, 1):
        cumulative_s += epoch_s
        lines.append(
            f"Epoch = {number}: Cumulative Time = {cumulative_s:.3f}, Epoch Time = {epoch_s:.3f}, "
            f"Images/sec = {rate:.2f}, Validation Loss = {loss:.3f}, Validation Accuracy = {accuracy:.3f}"
        )
    whole = "\nCommunication Time (all_reduce): 0.006016 seconds\n".join(lines)
    wrapped = re.sub("(?<=[=,]) ", lambda match: "\n" if data.draw(st.booleans()) else match[0], whole)
    names = ("cumulative_s", "epoch_s", "samples_per_s", "validation_loss", "validation_accuracy")
    printed = [re.findall(r"= (\d+(?:\.\d+)?)", line) for line in lines]
    assert columns(wrapped, *names) == [(int(each[0]), *map(float, each[1:])) for each in printed]


@settings(max_examples=200)
@given(
    batch=st.integers(1, 4096),
    ranks=st.integers(1, 64),
    each=st.integers(1, 3000),
    seconds=st.lists(st.floats(0.05, 1e4), min_size=1, max_size=5),
)
def test_a_batch_by_printed_rates_is_the_right_one_or_not_known(batch, ranks, each, seconds):
    samples = batch * ranks * each
    lines = [f"Epoch {n}: Epoch Time = {one:.3f}, Images/sec = {samples / one:.2f}" for n, one in enumerate(seconds)]
    found = throughput(parse_output("\n".join(lines)), Given(), None, ranks, each * len(seconds), 0.5)
    assert found["batch"] in (batch, None)
    # of 10 s printed to a millisecond and 100 samples/s to a hundredth, the samples are known to 0.02 %
    if min(seconds) > 10 and samples / max(seconds) > 100 and batch < 1000:
        assert (found["batch"], found["batch_from"]) == (batch, "epochs")
        assert found["samples_per_s"] == pytest.approx(ranks * batch / 0.5)


@pytest.mark.parametrize(
    ("steps", "says"), [(33, "33 steps are not the same whole number in each of 2 printed epochs"), (26, "no whole")]
)
def test_steps_that_do_not_fit_the_epochs_give_no_batch(steps, says):
    found = throughput(parse_output(STUDENT), Given(), None, 4, steps, 0.5)
    assert (found["batch"], found["samples_per_s"]) == (None, None)
    assert says in found["why"]
    assert "--batch N" in found["why"]


def test_what_the_user_says_comes_first():
    printed, known = Printed(batch=3), {"given": Given(batch=1), "plan": 2}
    assert throughput(printed, known["given"], known["plan"], 2, 9, 0.5)["samples_per_s"] == 2 * 1 / 0.5
    assert throughput(printed, Given(), known["plan"], 2, 9, 0.5)["batch"] == 2
    assert throughput(parse_output("0: Batch per rank = 3\n"), Given(), None, 2, 9, 0.5)["batch_from"] == "printed"
    alone = throughput(printed, Given(), None, 2, 9, None)
    assert (alone["samples_per_s"], alone["why"]) == (None, "no whole iteration was recorded")


# ---- a job


@pytest.fixture
def run(tmp_path):
    write_ddp_job(tmp_path / "job", Truth(iterations=8))  # two ranks, 0.2 s each
    return tmp_path / "job"


def analysis(capsys, *words):
    assert main(["analyze", *map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def output(*accuracies):
    # of 8 steps in two epochs, each of 4 steps of 2 ranks with 16 samples: 128 in 0.8 s
    lines = [
        f"Epoch = {number}: Cumulative Time = {0.8 * number:.3f}, Epoch Time = 0.800, Images/sec = 160.00, "
        f"Validation Accuracy = {accuracy:.3f}\n"
        for number, accuracy in enumerate(accuracies, 1)
    ]
    return "".join(lines)


def test_the_output_that_a_run_keeps_is_read_and_its_change_noticed(run, capsys):
    unknown = analysis(capsys, run)["throughput"]
    assert (unknown["samples_per_s"], unknown["why"]) == (None, "the batch size is not known: give it with --batch N")
    log = run / "nodes" / "n0" / "log" / "job.out"
    log.parent.mkdir()
    log.write_text(output(0.7, 0.9))
    found = analysis(capsys, run)
    assert (found["throughput"]["batch"], found["throughput"]["batch_from"]) == (16, "epochs")
    assert found["throughput"]["samples_per_s"] == pytest.approx(2 * 16 / 0.2)
    assert found["epochs"]["samples_per_s"] == pytest.approx(160)
    assert found["epochs"]["source"] == "nodes/n0/log/job.out"
    assert found["epochs"]["target"] == {"epoch": 2, "validation_accuracy": 0.9, "cumulative_s": 1.6}
    table = ringtap.open_job(run).epochs
    assert table["validation_accuracy"].tolist() == [0.7, 0.9]
    assert table["loss"].isna().all()
    assert set(table.attrs["columns"]) == set(table.columns)
    assert table.attrs["units"] == {"cumulative_s": "s", "epoch_s": "s", "samples_per_s": "1/s"}
    log.write_text(output(0.7, 0.6))
    assert analysis(capsys, run)["epochs"]["target"]["epoch"] == 1


def test_what_is_given_beside_a_run(run, tmp_path, capsys):
    log = tmp_path / "slurm-1.out"
    log.write_text(output(0.7, 0.9))
    assert analysis(capsys, run, "--batch", 8)["throughput"]["samples_per_s"] == pytest.approx(80)
    found = analysis(capsys, run, "--job-output", log, "--target-accuracy", 0.65)
    assert found["throughput"]["batch"] == 16
    assert found["epochs"]["target"] == {"epoch": 1, "validation_accuracy": 0.7, "cumulative_s": 0.8}
    found = analysis(capsys, run, "--job-output", log, "--target-accuracy", 0.95)["epochs"]
    assert (found["target"], found["why"]) == (None, "the best validation accuracy is 0.900, in epoch 2")
    edit_info(run, batch=4)
    assert analysis(capsys, run, "--job-output", log)["throughput"]["batch"] == 4
    assert main(["report", str(run), "--job-output", str(log), "--batch", "8", "--target-accuracy", "0.85"]) == 0
    assert "Throughput: 80.0 samples/s (2 ranks, 8 samples each)." in capsys.readouterr().out
    page = (run / "report" / "report.html").read_text()
    assert "Validation accuracy of 0.85 reached: 0.900 in epoch 2, after 1.6 s." in page
    assert '<th scope="col" class="n">validation accuracy</th>' in page


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--batch", "0"], "a batch of 0 has no samples"),
        (["--job-output", "none.out"], "none.out cannot be read: No such file"),
        (["--job-output", "."], ". cannot be read: it is not a regular file"),
        (["--target-accuracy", "85"], "a target accuracy of 85 is not a share"),
        (["--target-accuracy", "0"], "a target accuracy of 0 is not a share"),
    ],
)
def test_wrong_facts_are_refused_in_a_sentence(run, words, says, capsys):
    for verb in ("analyze", "report"):
        assert main([verb, str(run), *words]) == 2
        assert says in capsys.readouterr().err


def test_facts_of_a_job_are_not_for_a_table(tmp_path, capsys):
    (tmp_path / "points.csv").write_text("model,traffic,bandwidth_gbps,iteration_s\nvgg16,iperf,0,1\n")
    assert main(["report", str(tmp_path / "points.csv"), "--batch", "8", "--workers", "3"]) == 2
    assert "are for the run of a job" in capsys.readouterr().err


# ---- a sweep


def test_samples_per_s_of_points_follow_from_the_plan(tmp_path):
    path = tmp_path / "sweep"
    write_sweep(path, [("vgg16", "iperf")], loads_gbps=(0.0, 12.0))
    plan = json.loads((path / "run.json").read_text())["plan"]

    def points(**keys):
        edit_info(path, plan=plan | {"models": [plan["models"][0] | keys]})
        return ringtap.open_sweep(path).points

    default = points()  # of a plan before 0.2: the batch of Table 2.1
    assert default["samples_per_s"].tolist() == pytest.approx((3 * 64 / default["mean_s"]).tolist())
    own = points(batch=10, command=["train"])
    assert own["samples_per_s"].tolist() == pytest.approx((3 * 10 / own["mean_s"]).tolist())
    unknown = points(command=["train"])
    assert unknown["samples_per_s"].isna().all()
    assert unknown["reasons"].tolist() == ["samples/s: the plan has no batch for vgg16"] * 2
    assert pd.api.types.is_float_dtype(unknown["samples_per_s"])
