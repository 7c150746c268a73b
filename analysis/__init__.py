"""From run directories to iteration times, congestion points, fits and reports."""
