"""CUDA's speed tier: kernels of this project's own, written in Triton."""
