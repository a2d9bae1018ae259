"""Models, contexts and their KV caches: what applications embed."""
