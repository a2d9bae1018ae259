"""Names of the methods to choose from; what they do is in costs.py and gamma.py, which a --help need not import."""

BASES_K = ("pca", "query-aware", "kld-aware")
BASES_V = ("pca", "output-aware", "kld-aware")
GAMMAS = ("calibrated", "sqrt", "one")
