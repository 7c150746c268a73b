"""Holds what all parts share: errors, units, plans, records, counters, the run directory and its schema."""
