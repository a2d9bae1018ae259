"""Statistics to bases, and a budget to bands: the mathematics of `convert`."""
