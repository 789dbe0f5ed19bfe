"""Used by api and worker: messages, text, transport. Imports neither web nor tensor libraries."""
