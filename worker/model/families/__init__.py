"""One file per model_type; families do not import one another."""
