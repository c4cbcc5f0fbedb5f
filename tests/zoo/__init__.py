"""Architectures that nobody here wrote: each is exact in float64, or refused by name."""
