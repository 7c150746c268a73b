"""Draw the pictures of docs/reference/gallery.md: python scripts/draw_gallery.py [FOLDER] (docs/images)."""

from __future__ import annotations

import sys
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path

import matplotlib as mpl

ROOT = Path(__file__).resolve().parents[1]
RUNS = ROOT / "tests" / "gold" / "v0.1" / "runs.tar.xz"
DPI = 160


def pictures(runs: Path) -> dict[str, Callable[[], object]]:
    """Return what draws each picture, by the name of its function; ``runs`` has the recorded job."""
    import pandas as pd

    import ringtap

    job = ringtap.open_job(runs / "job")
    points = pd.read_csv(ROOT / "examples" / "points.csv")
    fit = ringtap.CongestionModel("25gbit").fit(points["bandwidth_gbps"], points["iteration_s"])
    traffic = ringtap.read_captures(ROOT / "examples" / "ring.pcap.gz", "tcp", cache=False)
    rates = traffic.rates("conversation", bin_s="100ms", fill=True)
    return {
        "iteration_times": lambda: ringtap.plot.iteration_times(job),
        "cdf": lambda: ringtap.plot.cdf(job, label="two ranks"),
        "timeline": lambda: ringtap.plot.timeline(job, 12),
        "fit": fit.plot,
        "rescaled": lambda: ringtap.plot.rescaled(fit),
        "matrix": lambda: ringtap.plot.matrix(traffic),
        "rates": lambda: ringtap.plot.rates(rates),
    }


def draw(folder: Path) -> list[Path]:
    """Draw all pictures into a folder; return their paths."""
    mpl.use("Agg")
    import matplotlib.pyplot as plt

    paths = []
    with tempfile.TemporaryDirectory() as unpacked:
        with tarfile.open(RUNS) as archive:
            archive.extractall(unpacked, filter="data")
        for name, make in pictures(Path(unpacked)).items():
            make()
            paths.append(folder / f"gallery-{name}.png")
            plt.gcf().savefig(paths[-1], dpi=DPI, metadata={"Software": None})
            plt.close("all")
    return paths


if __name__ == "__main__":
    for path in draw(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "images"):
        print(f"Wrote {path}")
