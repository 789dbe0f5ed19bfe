"""What is sent to a Redis server: ports, scripts, codecs and records of jobs."""
