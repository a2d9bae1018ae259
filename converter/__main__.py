"""`python -m converter` is `convert`."""

from converter.cli import main

if __name__ == "__main__":
    main()
