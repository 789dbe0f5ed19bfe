"""vLLM as the engine of a worker: runs in the engine process, in an interpreter of its own."""
