"""A cache for transformers that uses the same files. Extra `torch`."""
