"""Gains of sending gradients in another order, really run, against those that `ringtap whatif` predicts.

python benchmarks/tensor_order.py [--models NAME,...] [--rounds N] [--iterations N] [-o FILE]

Two ranks of each scale model run on a virtual testbed of two hosts, and send their gradients by each method in turn. A
link has a rate at which all gradients take about as long as the computation. The prediction has the cost of messages
from the same job: the time of small ones, one at a time and with many in flight, and the bytes that the link's limit
counts, of each method's messages without computation and of all gradients as one. Three models take eight minutes, and
root.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

import _checkout  # noqa: F401 -- first: lets the others import ringtap
from _order_job import MESSAGES
from _result import write_result

import ringtap
from ringtap.core.models import GRADIENT_BYTES, profile_named
from ringtap.examples.scale_model import FORWARD_SHARE, model_layers
from ringtap.workload.tensor_order_models import LayerTensor, LogGP, schedule, schedules

JOB = Path(__file__).with_name("_order_job.py")
SCALE, PORT, BURST_BYTES = 100, 29500, 65_536
RATES_BPS = {"resnet50": 50e6, "vgg16": 100e6, "bert-large": 200e6}
PIECE_BYTES, CREDIT_BYTES = 65_536, 131_072
# bytes of a message and in flight; 0: a tensor, and one message
SETTINGS = {
    "fifo": (0, 0), "tic": (0, 0), "tac": (0, 0), "p3": (PIECE_BYTES, 0), "bytescheduler": (PIECE_BYTES, CREDIT_BYTES)
}  # fmt: skip


def measured(testbed: ringtap.Testbed, *arguments: object) -> dict[str, list[list[float]]]:
    """Run the job on all hosts, and return what rank 0 has measured."""
    ranks = []
    for rank, host in enumerate(testbed.hosts):
        variables = {"RANK": rank, "WORLD_SIZE": len(testbed.hosts), "MASTER_ADDR": testbed.address(testbed.hosts[0])}
        variables |= {"MASTER_PORT": PORT, "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": 1}
        command = ["env", *(f"{name}={value}" for name, value in variables.items())]
        command += [sys.executable, str(JOB), *map(str, arguments)]
        ranks.append(subprocess.Popen(testbed.command(host, *command), stdout=subprocess.PIPE, text=True))
    texts = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        sys.exit("the job failed")
    found: dict[str, list[list[float]]] = json.loads(texts[0])
    return found


def compared(model: str, found: dict[str, list[list[float]]]) -> dict[str, Any]:
    """Return the measured and predicted times and gains of a model, and the network of the prediction."""
    layers, compute_s = model_layers(model, SCALE), profile_named(model).compute_s
    tensors = [
        LayerTensor(
            str(number), GRADIENT_BYTES * sum(layer.sizes), compute_s * FORWARD_SHARE * layer.forward_share,
            compute_s * (1 - FORWARD_SHARE) * layer.backward_share,
        )
        for number, layer in enumerate(layers)
    ]  # fmt: skip
    times_s = {what: [median(each) for each in rounds] for what, rounds in found.items() if what != "sent_bytes"}
    (whole_bytes, *sent_bytes), link_bps = found["sent_bytes"][0], RATES_BPS[model]
    gradient_bytes = sum(each.size_bytes for each in tensors)
    orders = {method: each.order for method, each in schedules(tensors, LogGP(link_bps)).items()}
    predicted_s: dict[str, list[float]] = {}
    networks: dict[str, LogGP] = {}
    for number, (method, (piece_bytes, credit_bytes)) in enumerate(SETTINGS.items()):
        messages = sum(-(-each.size_bytes // (piece_bytes or each.size_bytes)) for each in tensors)
        # the costs of a message change with the time: those of a round were measured beside the method
        costs_s = zip(*(times_s[what][number :: len(SETTINGS)] for what in ("alone", "overhead")), strict=True)
        predicted_s[method] = []
        for alone_s, overhead_s in costs_s:
            busy_s = min(overhead_s, alone_s) / MESSAGES
            # two ranks send a gradient once
            networks[method] = LogGP(
                link_bps * gradient_bytes / whole_bytes, 1.0, alone_s / MESSAGES - busy_s, busy_s,
                8 * BURST_BYTES / link_bps, max(sent_bytes[number] - whole_bytes, 0.0) / messages,
            )  # fmt: skip
            each = schedule(tensors, orders[method], networks[method], piece_bytes or None, credit_bytes)
            predicted_s[method].append(each.iteration_s)
    rows = [
        {
            "method": method, "measured_each_s": times_s[method], "measured_s": median(times_s[method]),
            "measured_gain": _gain(times_s, method), "predicted_each_s": each_s, "predicted_s": median(each_s),
            "predicted_gain": _gain(predicted_s, method), "network": networks[method]._asdict(),
        }
        for method, each_s in predicted_s.items()
    ]  # fmt: skip
    return {"model": model, "link_bps": link_bps, "rows": rows, "measured": found}


def _gain(each_s: dict[str, list[float]], method: str) -> float:
    """Return the median gain of a method over FIFO in a round."""
    return median(1 - new_s / old_s for new_s, old_s in zip(each_s[method], each_s["fifo"], strict=True))


def lines(found: dict[str, Any]) -> list[str]:
    """Return the rows of a model in the table."""
    written = []
    for row in found["rows"]:
        each_s, gains = row["measured_each_s"], [100 * row[what] for what in ("measured_gain", "predicted_gain")]
        cells = [
            f"{found['model']}, {found['link_bps'] / 1e6:g} Mbit/s", row["method"],
            f"{1e3 * row['measured_s']:.0f} ({1e3 * min(each_s):.0f} to {1e3 * max(each_s):.0f})",
            f"{1e3 * row['predicted_s']:.0f}", f"{row['predicted_s'] / row['measured_s'] - 1:+.1%}",
            *(f"{gain:.1f}" for gain in gains), f"{gains[1] - gains[0]:+.1f}",
        ]  # fmt: skip
        written.append(f"| {' | '.join(cells)} |")
    return written


def main() -> int:
    """Print a table and, last, one JSON object."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", default=",".join(RATES_BPS), help="models, with commas between")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="rounds of all methods")
    parser.add_argument("--iterations", type=int, default=5, metavar="N", help="iterations of a method in a round")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="also write the JSON object to a file")
    options = parser.parse_args()
    print("| model | method | measured, ms (range of rounds) | predicted, ms | error | gain over FIFO, measured, % "
          "| predicted, % | difference, points |")  # fmt: skip
    print("|---" * 8 + "|")
    models = []
    for model in options.models.split(","):
        with ringtap.testbed(2, RATES_BPS[model], burst=BURST_BYTES) as testbed:
            found = measured(testbed, model, SCALE, options.rounds, options.iterations, json.dumps(SETTINGS))
        models.append(compared(model, found))
        print("\n".join(lines(models[-1])), flush=True)
    print()
    for row in (row for found in models for row in found["rows"]):
        network = LogGP(**row["network"])
        print(
            f"{row['method']}: in the last round, a message takes {1e3 * (network.overhead_s + network.latency_s):.2f} "
            f"ms beside its bytes, of which it occupies its sender for {1e3 * network.overhead_s:.2f} ms, and adds "
            f"{network.header_bytes:.0f} bytes; gradients have {network.rate_bps / 1e6:.1f} Mbit/s"
        )
    write_result({"scale": SCALE, "models": models}, options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
