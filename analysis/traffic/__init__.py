"""Cross traffic as it was planned, sent and captured."""
