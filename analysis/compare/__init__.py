"""Compares runs: measures each of them, tests their differences, and writes a page."""
