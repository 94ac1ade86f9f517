"""Decoding with a cache: the cached forward pass, sampling programs, and keys and values of trees."""
