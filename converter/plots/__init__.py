"""Plots of measurements. Extra `plot`."""
