"""Entry point of `python -m runtime.experiments`."""

from runtime.experiments.cli import main

if __name__ == "__main__":
    main()
