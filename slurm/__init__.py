"""Submission of jobs and sweeps to Slurm clusters, and site profiles."""
