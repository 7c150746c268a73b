"""Submits jobs and sweeps to Slurm clusters, by site profiles."""
