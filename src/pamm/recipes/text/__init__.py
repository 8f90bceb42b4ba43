"""Text to train on: files and folders, data sets of the hub, Python's own documentation."""
