"""Reads points and series of sweeps, from run directories and tables."""
