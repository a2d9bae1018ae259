"""Pictures of what was measured. Extra `plot`."""
