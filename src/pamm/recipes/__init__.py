"""Complete jobs on real data, on the Transformers Trainer."""
