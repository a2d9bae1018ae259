"""What files hold: calibrations, layouts, bases, the exact window (converter/FORMAT.md)."""
