"""File names of a submission."""

from __future__ import annotations

from pathlib import Path

from ringtap.core.schema import PARTS


class SubmitPaths:
    """Files that a submission adds to its run directory.

    Args:
        run: the run directory; it is made absolute, and links in it are kept.
    """

    def __init__(self, run: Path) -> None:
        self.run = run.absolute()

    @property
    def folder(self) -> Path:
        """Folder of the submission, in which sbatch is called."""
        return self.run / "submit"

    @property
    def script(self) -> Path:
        """Batch script."""
        return self.folder / "job.sh"

    @property
    def request(self) -> Path:
        """The request and the ids of its jobs (request.json)."""
        return self.folder / "request.json"

    @property
    def plan(self) -> Path:
        """Plan of a sweep, as it was first submitted."""
        return self.folder / "plan.toml"

    def output(self, job: str) -> Path:
        """Output of the script, its steps and Slurm; ``job`` as in `state`."""
        return self.folder / f"slurm-{job}.out"

    @property
    def states(self) -> Path:
        """Folder of the jobs' state files."""
        return self.folder / "state"

    def state(self, job: str) -> Path:
        """State file of a job (`ringtap.slurm.job`).

        Args:
            job: id of the job; for a task of an array ``<array's id>_<index>``.
        """
        return self.states / job

    def step(self, job: str, name: str) -> Path:
        """File with the id of one of a job's steps; ``job`` as in `state`."""
        return self.states / f"{job}.{name}"

    @property
    def results(self) -> Path:
        """Folder of the files kept from the nodes' own disks, with one folder per node."""
        return self.run / "results"

    @property
    def parts(self) -> Path:
        """Folder of the run directories of a plan's series."""
        return self.run / PARTS
