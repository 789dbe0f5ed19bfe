"""How to reach a Redis server: URL, connections, pub/sub, scripts, checks."""
