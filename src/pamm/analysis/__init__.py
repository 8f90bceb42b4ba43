"""Measures; never trains."""
