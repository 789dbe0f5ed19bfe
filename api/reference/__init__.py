"""Sentences and examples of the OpenAPI document, read when a client requests it."""
