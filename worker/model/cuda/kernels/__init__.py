"""The kernels, which the host code of the folder above launches. Triton types them, not mypy."""
