"""Fine-tunings: every arm tuned alike, with several seeds. ``glue`` and ``vlm`` are two."""
