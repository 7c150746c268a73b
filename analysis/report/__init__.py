"""Writes reports of sweeps, tables of iteration times and jobs: one page, figures, data."""
