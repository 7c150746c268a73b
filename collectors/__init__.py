"""One module a source of measurements, each with check, start and stop."""
