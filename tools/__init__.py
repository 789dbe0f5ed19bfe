"""Programs that make what Penstock ships; not installed with it."""
