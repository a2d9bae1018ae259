"""Entry point of `python -m research.warmstart`."""

from research.warmstart.cli import main

if __name__ == "__main__":
    main(prog_name="python -m research.warmstart")
