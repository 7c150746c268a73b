"""Iteration times with gradients sent in other orders, really run, against those of `ringtap whatif`.

python benchmarks/tensor_order.py [--models NAME,...] [--rate MBIT] [--slower N] [--iterations N] [-o FILE]

Two ranks of the scale model run on a virtual testbed of two hosts, by each method in turn, three times. The time of a
message beside its bytes is measured first, with tensors of one element, and goes into the prediction. With --slower N,
computation takes N times as long and the link has an Nth of the rate, so that this time matters less. Three models
take ten minutes, and root.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
from pathlib import Path

import _checkout  # noqa: F401 -- first: lets the others import ringtap

import ringtap
from ringtap.examples.scale_model import FORWARD_SHARE, model_layers
from ringtap.models import GRADIENT_BYTES, profile_named
from ringtap.workload.tensor_order import LayerTensor, Network, ScheduledIteration, bound_s, schedules

SCALE = 100
# TCP payload of the bytes that the links' limit counts: frames of 1,514 bytes without preamble and checksum
PAYLOAD_SHARE = 1448 / 1514
MODELS, ROUNDS = ("resnet50", "vgg16", "bert-large"), 3
SLICE_BYTES, PARTITION_BYTES, CREDIT_BYTES = 65_536, 262_144, 524_288
SETTINGS = {"p3": (SLICE_BYTES, 0), "bytescheduler": (PARTITION_BYTES, CREDIT_BYTES)}
PORT = 29500
ITERATION = re.compile(r"iterations, ([\d.]+) s each")


def iteration_s(testbed: ringtap.Testbed, method: str, iterations: int, words: list[str]) -> float:
    """Return the mean iteration time of two ranks of the scale model under a method."""
    piece_bytes, credit_bytes = SETTINGS.get(method, (0, 0))
    words = [*words, "--iterations", str(iterations), "--schedule", method]
    words += ["--piece-bytes", str(piece_bytes), "--credit-bytes", str(credit_bytes)]
    ranks = []
    for rank, host in enumerate(testbed.hosts):
        variables = {"RANK": rank, "WORLD_SIZE": len(testbed.hosts), "MASTER_ADDR": testbed.address(testbed.hosts[0])}
        variables |= {"MASTER_PORT": PORT, "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": 1}
        command = ["env", *(f"{name}={value}" for name, value in variables.items())]
        command += [sys.executable, "-m", "ringtap.examples.scale_model", *words]
        ranks.append(subprocess.Popen(testbed.command(host, *command), stdout=subprocess.PIPE, text=True))
    texts = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        sys.exit(f"the job failed under {method}")
    found = ITERATION.search(texts[0])
    assert found is not None, texts[0]
    return float(found[1])


def latency_s(testbed: ringtap.Testbed, method: str) -> float:
    """Return the time of a message of two ranks beside its bytes, with one tensor of an element per layer."""
    layers = 50
    words = ["--parameters", str(layers), "--layers", str(layers), "--compute-s", "0"]
    return iteration_s(testbed, method, 40, words) / layers


def main() -> int:
    """Print a table and, last, one JSON object."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", default=",".join(MODELS), help="models, with commas between")
    parser.add_argument("--rate", type=float, default=100, metavar="MBIT", help="rate of the link, in Mbit/s (100)")
    parser.add_argument("--slower", type=float, default=1, metavar="N", help="factor of every time")
    parser.add_argument("--iterations", type=int, default=40, metavar="N", help="iterations of a job")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="also write the JSON object to a file")
    options = parser.parse_args()
    rows = []
    rate_bps = 1e6 * options.rate / options.slower
    with ringtap.testbed(2, rate_bps) as testbed:
        each_s = statistics.median(latency_s(testbed, "fifo") for _ in range(ROUNDS))
        network = Network(rate_bps * PAYLOAD_SHARE, 1.0, each_s)  # two ranks send a gradient once
        print(f"A message takes {1e3 * each_s:.2f} ms beside its bytes\n")
        print("| model | method | measured, ms | predicted, ms | error | gain, measured | gain, predicted |")
        print("|---" * 7 + "|")
        for model in options.models.split(","):
            compute_s = options.slower * profile_named(model).compute_s
            tensors = [
                LayerTensor(
                    str(number), GRADIENT_BYTES * sum(layer.sizes), compute_s * FORWARD_SHARE * layer.forward_share,
                    compute_s * (1 - FORWARD_SHARE) * layer.backward_share,
                )
                for number, layer in enumerate(model_layers(model, SCALE))
            ]  # fmt: skip
            found = schedules(tensors, network, SLICE_BYTES, PARTITION_BYTES, CREDIT_BYTES)
            words = ["--model", model, "--scale", str(SCALE), "--compute-s", str(compute_s)]
            times: dict[str, list[float]] = {method: [] for method in found}
            for _ in range(ROUNDS):
                for method, each in times.items():
                    each.append(iteration_s(testbed, method, options.iterations, words))
            rows += compared(model, times, found, bound_s(tensors, network))
            for row in rows[-len(found) :]:
                measured, predicted = (f"{1e3 * row[what]:.1f}" for what in ("measured_s", "predicted_s"))
                gains = [f"{row[what]:+.1%}" for what in ("measured_gain", "predicted_gain")]
                spread = f"{1e3 * min(row['measured_each_s']):.1f} to {1e3 * max(row['measured_each_s']):.1f}"
                cells = (model, row["method"], f"{measured} ({spread})", predicted)
                print(
                    "", *cells, f"{row['predicted_s'] / row['measured_s'] - 1:+.1%}", *gains, "", sep=" | ", flush=True
                )
    text = json.dumps({"latency_s": each_s, "rate_bps": rate_bps, "slower": options.slower, "rows": rows})
    if options.output:
        options.output.write_text(text)
    print(text)
    return 0


def compared(
    model: str, times: dict[str, list[float]], found: dict[str, ScheduledIteration], least_s: float
) -> list[dict[str, object]]:
    """Return a row per method: measured and predicted time, and the gain over FIFO."""
    medians = {method: statistics.median(each) for method, each in times.items()}
    return [
        {
            "model": model, "method": method, "measured_s": median_s, "measured_each_s": times[method],
            "predicted_s": found[method].iteration_s, "bound_s": least_s,
            "measured_gain": 1 - median_s / medians["fifo"],
            "predicted_gain": 1 - found[method].iteration_s / found["fifo"].iteration_s,
        }
        for method, median_s in medians.items()
    ]  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
