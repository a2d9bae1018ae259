"""Calibration statistics to bases, coefficient layouts and GGUF metadata. Formats: FORMAT.md in this folder."""
