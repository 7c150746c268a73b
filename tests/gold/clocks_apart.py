"""Lets the clocks of a made-up run differ: what every node logged is by a clock that is ahead of the reference's."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from ringtap.core.append_only_logs import open_records
from ringtap.core.run_directory import write_json


def set_ahead(job: Path, ahead_ns: Mapping[str, int], reference: str = "") -> dict[int, int]:
    """Set the clocks of nodes ahead, as if from before the recording on.

    Args:
        job: the run directory of the job.
        ahead_ns: by how much, by node.
        reference: the node to which they were compared.

    Returns:
        The last end of each step, by the true time: as the conductor of a sweep times it, by the ranks' own clocks.
    """
    true_ns: dict[int, int] = {}
    own_ns: dict[int, int] = {}
    for node, by_ns in ahead_ns.items():
        for path in (job / "nodes" / node).glob("*/*.rec"):
            file = open_records(path)
            kinds = [(field.name, field.type) for field in file.fields]
            records = np.fromfile(path, np.dtype(kinds), offset=file.offset)
            if "step" in records.dtype.names:
                for step, end_ns in zip(records["step"].tolist(), records["end_ns"].tolist(), strict=True):
                    true_ns[step] = max(true_ns.get(step, 0), end_ns)
                    own_ns[step] = max(own_ns.get(step, 0), end_ns + by_ns)
            for name in records.dtype.names:
                if name in ("t_ns", "start_ns", "end_ns") or (name.endswith(("_start_ns", "_end_ns"))):
                    records[name] += np.where(records[name] > 0, by_ns, 0)
            with path.open("r+b") as stream:
                stream.seek(file.offset)
                stream.write(records.tobytes())
        (job / "nodes" / node / "clock").mkdir(exist_ok=True)
        fit = {"t0_ns": 0, "offset_ns": by_ns, "drift_ppm": 0.0, "error_ns": 1000}
        write_json(job / "nodes" / node / "clock" / "clock.json", {"reference": reference, "fit": fit})
    return {true_ns[step]: own for step, own in own_ns.items()}


def retime_windows(lines: Path, job: str, own_ns: Mapping[int, int]) -> None:
    """Give the windows of a job in points.jsonl the times of `set_ahead`."""
    items = [json.loads(line) for line in lines.read_text().splitlines()]
    for item in items:
        if item["directory"] == job:
            item |= {name: own_ns[item[name]] for name in ("window_start_ns", "window_end_ns")}
    lines.write_text("".join(json.dumps(item) + "\n" for item in items))
