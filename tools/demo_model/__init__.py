"""Trains the demo model that ships in worker/demo/checkpoint."""
