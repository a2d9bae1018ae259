"""Entry point of `python -m runtime.tasks`."""

from runtime.tasks.cli import main

if __name__ == "__main__":
    main()
