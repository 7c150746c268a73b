"""Models the iteration time under load: fits, congestion points, predictions."""
