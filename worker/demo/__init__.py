"""The small model that ships with the repository: its text, its training and its checkpoint."""
