"""Sweeps: series of training jobs that are measured under stepped cross traffic."""
