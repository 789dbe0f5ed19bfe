"""The engines with one interface: Penstock's own, vLLM, and an echo; models of transformers."""
