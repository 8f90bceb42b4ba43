"""Complete jobs on real data, on the Transformers Trainer. Files here are what folders share."""
