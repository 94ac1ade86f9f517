"""Pallas kernels: what XLA would compute with more memory or more work than it takes."""
