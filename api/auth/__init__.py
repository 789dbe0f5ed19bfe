"""API keys, what a request may see, and tokens for one job's stream."""
