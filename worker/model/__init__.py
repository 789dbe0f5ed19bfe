"""Tensors: model families, the KV cache, attention, sampling."""
