"""`python -m runtime.tasks`, the former name of `python -m research.tasks`: names it and exits with 2."""

from runtime.cli import main

if __name__ == "__main__":
    main(["lab", "tasks"], prog_name="subkv")
