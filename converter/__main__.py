"""`python -m converter` is `convert`."""

from converter.cli import main

main()
