"""The core: decides which tokens to compute. Pure Python, no device, no clock, no network."""
