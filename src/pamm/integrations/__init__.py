"""Trainers and adapters of other libraries, one file each."""
