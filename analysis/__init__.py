"""Analysis of run directories: iteration times, congestion points, fits and reports."""
