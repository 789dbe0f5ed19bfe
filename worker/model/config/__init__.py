"""The configuration of a checkpoint: config.json, read strictly."""
