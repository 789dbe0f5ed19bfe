"""Batches: input files read, rows run as jobs, results written."""
