"""The Triton kernels: matrix products, attention, routing and row operations."""
