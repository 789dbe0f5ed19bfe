"""Batches: files of requests, run row by row in the lowest lane, answers written to files."""
