"""Measurements of time and memory, always beside the standard layer."""
