"""What the dashboard shows of the whole deployment, live: read once for all who look."""
