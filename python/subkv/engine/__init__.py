"""Models, contexts and their KV caches, for applications."""
