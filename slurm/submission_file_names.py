"""Lists the files that a submission adds to its run directory."""

from __future__ import annotations

from pathlib import Path

from ringtap.core.run_directory_schema import PARTS


class SubmitPaths:
    """Files that a submission adds to its run directory.

    Args:
        run: the run directory; it is made absolute, and links in it are kept.

    Attributes:
        run: the run directory.
        folder: folder of the submission, in which sbatch is called.
        script: batch script.
        request: the request and the ids of its jobs (request.json).
        plan: plan of a sweep, as it was first submitted.
        states: folder of the jobs' state files.
        results: folder of the files kept from the nodes' own disks, with one folder per node.
        parts: folder of the run directories of a plan's series.
    """

    def __init__(self, run: Path) -> None:
        self.run = run.absolute()
        self.folder = self.run / "submit"
        self.script = self.folder / "job.sh"
        self.request = self.folder / "request.json"
        self.plan = self.folder / "plan.toml"
        self.states = self.folder / "state"
        self.results = self.run / "results"
        self.parts = self.run / PARTS

    def output(self, job: str) -> Path:
        """Output of the script, its steps and Slurm; ``job`` as in `state`."""
        return self.folder / f"slurm-{job}.out"

    def state(self, job: str) -> Path:
        """State file of a job (`ringtap.slurm.job_state_file`).

        Args:
            job: id of the job; for a task of an array ``<array's id>_<index>``.
        """
        return self.states / job

    def step(self, job: str, name: str) -> Path:
        """File with the id of one of a job's steps; ``job`` as in `state`."""
        return self.states / f"{job}.{name}"
