"""Slurm clusters: submission and site profiles."""
