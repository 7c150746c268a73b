"""A sweep: series of training jobs measured under stepped cross traffic."""
