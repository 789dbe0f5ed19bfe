"""`make run`: one Redis, workers and frontends on this machine, started and stopped together."""
