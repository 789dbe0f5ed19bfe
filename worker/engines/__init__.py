"""The engines behind one interface: Penstock's own, vLLM, and an echo; models of transformers."""
