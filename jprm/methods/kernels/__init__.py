"""Attention for TPUs and GPUs."""
