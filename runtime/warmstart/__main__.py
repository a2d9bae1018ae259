"""Entry point of `python -m runtime.warmstart`."""

from runtime.warmstart.cli import main

if __name__ == "__main__":
    main(prog_name="python -m runtime.warmstart")
