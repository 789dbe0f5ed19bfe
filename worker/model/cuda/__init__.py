"""The model on NVIDIA GPUs: Triton kernels, the stack that launches them, and CUDA graphs."""
