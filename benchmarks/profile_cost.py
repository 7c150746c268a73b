"""Cost of ``ringtap run --profile`` for the iterations that are profiled, in pairs of jobs (docs/commands/workload.md).

python benchmarks/profile_cost.py [--quick] [-o FILE]
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path

import _checkout  # noqa: F401 -- first: lets the others import ringtap
from _result import write_result

from ringtap.core.records import open_records

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
JOBS = {
    "Wide-ResNet": ["wide_resnet.py", "--epochs", "1", "--images", "4000", "--depth", "10", "--width", "1"],
    "scale model of ResNet-50, 108 modules": [
        "scale_model.py", "--model", "resnet50", "--compute-s", "0.08", "--iterations", "30",
    ],
}  # fmt: skip
FIRST, LAST = 4, 22  # of the profiled iterations
_T95 = {2: 4.30, 9: 2.26}


def iteration_s(job: list[str], folder: Path, *, profiled: bool) -> float:
    """Run a job of two ranks, and return the median time of the iterations that are profiled, or would be."""
    command = [sys.executable, "-m", "ringtap", "run", "--collect", "steps", "-o", str(folder)]
    command += ["--profile"] if profiled else []
    command += ["--", sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(EXAMPLES / job[0]), *job[1:]]
    subprocess.run(command, check=True, capture_output=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    (path,) = folder.glob("nodes/*/steps/rank0-*[0-9].rec")
    records = open_records(path)
    column = [field.name for field in records.fields].index("end_mono_ns")
    ends_ns = [int(row[column]) for row in records.walk()][FIRST - 1 : LAST + 1]
    return statistics.median(after - before for before, after in pairwise(ends_ns)) / 1e9


def main() -> int:
    """Print a table and, last, one JSON object."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="three pairs instead of ten")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="also write the JSON object to a file")
    options = parser.parse_args()
    pairs = 3 if options.quick else 10
    found = []
    print("| job | iteration, ms | cost | 95 % interval |\n|---|---|---|---|")
    for title, job in JOBS.items():
        ratios, plain_s = [], []
        with tempfile.TemporaryDirectory(prefix="ringtap-benchmark-") as folder:
            for pair in range(pairs):
                times = {}
                for profiled in (False, True) if pair % 2 else (True, False):
                    times[profiled] = iteration_s(job, Path(folder) / f"{pair}-{profiled}", profiled=profiled)
                ratios.append(math.log(times[True] / times[False]))
                plain_s.append(times[False])
        middle = statistics.fmean(ratios)
        width = _T95[pairs - 1] * statistics.stdev(ratios) / math.sqrt(pairs)
        cost, low, high = (math.expm1(value) for value in (middle, middle - width, middle + width))
        print(
            f"| {title} | {1e3 * statistics.median(plain_s):.1f} | {cost:+.1%} | {low:+.1%} to {high:+.1%} |",
            flush=True,
        )
        found.append({"job": title, "iteration_s": statistics.median(plain_s), "cost": cost, "low": low, "high": high})
    write_result({"pairs": pairs, "jobs": found}, options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
