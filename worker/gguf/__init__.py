"""GGUF files as checkpoints: what their metadata has becomes the files that all else reads."""
