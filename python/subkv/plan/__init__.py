"""The mathematics of `convert`: bases from statistics, and bands from a budget."""
