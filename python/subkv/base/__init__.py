"""Errors, files, commands and progress; depends on no model and no native library."""
