"""One folder for each API dialect. Dialects do not import one another."""
