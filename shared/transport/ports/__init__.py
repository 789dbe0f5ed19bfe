"""The ports between api and worker and the transport that carries their jobs."""
