"""Entry point of `python -m research.tasks`."""

from research.tasks.cli import main

if __name__ == "__main__":
    main()
