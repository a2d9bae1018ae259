"""Names of the methods in costs.py and gamma.py, which --help should not import."""

BASES_K = ("pca", "query-aware", "kld-aware")
BASES_V = ("pca", "output-aware", "kld-aware")
GAMMAS = ("calibrated", "sqrt", "one")
