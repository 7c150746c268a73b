"""Recording of a small real run: two ranks of the scale model, each under ringtap, on two hosts of a testbed.

python benchmarks/_scale_record.py RUN ITERATIONS

It needs root, or permission to create user namespaces. The testbed ends with this program.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from _checkout import ROOT

from ringtap.agents.testbed.launch import RunningTestbed
from ringtap.agents.testbed.topology import TestbedSpec
from ringtap.core.errors import RingtapError

_HOSTS = ("S0", "S1")
_JOB = ROOT / "examples" / "scale_model.py"
_COMPUTE_S = "0.079"  # for about ten iterations per second


def main() -> int:
    """Run the command line above; return the exit code of the job."""
    run, iterations = sys.argv[1:]
    name = f"scale{os.getpid()}"
    launch = {"WORLD_SIZE": str(len(_HOSTS)), "MASTER_ADDR": _HOSTS[0], "MASTER_PORT": "29500", "LOCAL_RANK": "0"}
    launch |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0"}
    launch |= {"TMPDIR": str(Path(run).resolve().parent)}  # torch leaves folders behind in it
    try:
        with RunningTestbed(TestbedSpec(name=name, hosts=_HOSTS, rate_bps=2_000_000_000), verify=False):
            jobs = []
            for rank, host in enumerate(_HOSTS):
                ringtap = [sys.executable, "-m", "ringtap.cli"]
                command = [*ringtap, "testbed", "exec", "--testbed", name, host, "--", *ringtap, "run", "--node", host]
                command += ["--join", run, "--", sys.executable, str(_JOB)]
                command += ["--iterations", iterations, "--compute-s", _COMPUTE_S]
                jobs.append(subprocess.Popen(command, env={**os.environ, **launch, "RANK": str(rank)}))
            return max(abs(job.wait()) for job in jobs)
    except RingtapError as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
