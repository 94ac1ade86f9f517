"""Decoding with a cache: the cached forward pass, sampling programs, and trees' keys and values."""
