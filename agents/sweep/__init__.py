"""Measures sweeps: series of training jobs under stepped cross traffic."""
