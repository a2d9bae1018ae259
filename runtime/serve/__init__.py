"""`subkv serve`: llama-server on a cache of coefficients. examples/cluster runs it on many machines."""
