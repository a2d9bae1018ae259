"""The papers' experiments in one command: `python -m research.experiments` (research/experiments/cli.py)."""
