"""Structure of a training job, inferred from its packets."""
