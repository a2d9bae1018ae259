"""What everything stands on: errors, files, programs, progress. Knows no model and no native library."""
