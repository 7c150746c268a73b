"""How far the clocks of a run's nodes are apart."""
