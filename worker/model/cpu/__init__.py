"""The CPU's speed tiers: packed weights, and kernels of our own where a compiler is at hand."""
