"""How to reach a Redis server: URLs, connections, the primary, pub/sub, checks."""
