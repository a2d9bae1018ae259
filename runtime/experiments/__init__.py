"""The papers' experiments in one command: `python -m runtime.experiments` (runtime/experiments/cli.py)."""
