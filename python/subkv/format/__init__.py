"""File contents: calibrations, layouts, bases, the exact window (converter/FORMAT.md)."""
