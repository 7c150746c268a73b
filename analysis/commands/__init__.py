"""Implements the commands of the analysis, one module per verb."""
