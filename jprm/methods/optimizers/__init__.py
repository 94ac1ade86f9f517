"""Optimizers beside AdamW."""
