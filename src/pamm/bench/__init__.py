"""Benchmarks: one layer group, whole training steps, and where a step's time goes."""
