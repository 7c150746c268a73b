"""Collectors: one module per source of measurements, each with check, start, sample and stop."""
