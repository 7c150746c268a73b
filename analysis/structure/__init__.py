"""Infers the structure of a training job from its packets."""
