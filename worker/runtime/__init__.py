"""The process that owns an engine, and the service's link to it."""
