"""vLLM as a worker's engine: runs in the engine process, in its own interpreter."""
