"""POST /generate, the native dialect."""
