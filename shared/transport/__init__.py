"""The protocol with a Redis server: ports, scripts, codecs and records of jobs."""
