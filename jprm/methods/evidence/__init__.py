"""Reads evidence about chains from many sources, and weighs it in one verifier."""
