"""Fused and CPU-fast kernels for cached memories: torch, and triton when asked; importing is free.

This package knows nothing of mcretrofit. `cached_read` reads a bank of frozen states, `network_read`
runs a bank of frozen networks.
"""
