"""Entry point of `python -m research.experiments`."""

from research.experiments.cli import main

if __name__ == "__main__":
    main()
