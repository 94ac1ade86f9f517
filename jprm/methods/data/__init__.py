"""Readers of step-label sources, and `prepare`, which writes their records into folders."""
