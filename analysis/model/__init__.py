"""The general model of iteration time under load: fits, congestion points, predictions."""
