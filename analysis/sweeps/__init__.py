"""Sweeps read for analysis: their points and series, from run directories and tables."""
