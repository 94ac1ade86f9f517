"""Attention kernels for TPUs and GPUs: a file each, with its tables of blocks."""
