"""Penstock as it is installed: the command `penstock`, and what other programs may import."""
