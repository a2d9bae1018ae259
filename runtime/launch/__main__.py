"""Entry point of `python -m runtime.launch`."""

from runtime.launch.cli import main

if __name__ == "__main__":
    main()
