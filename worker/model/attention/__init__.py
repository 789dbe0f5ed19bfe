"""Attention over the paged KV cache: the port and one file per backend."""
