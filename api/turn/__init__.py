"""What a model's text says: an answer, its reasoning, calls of tools."""
