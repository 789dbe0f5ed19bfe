"""Tensor parallel: one model over several processes, the ranks, each with its part of it."""
