"""Jobs in Redis: ports, scripts, codecs and records."""
