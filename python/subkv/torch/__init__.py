"""The cache of transformers on the same files. Extra `torch`."""
