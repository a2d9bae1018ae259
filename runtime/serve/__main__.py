"""python -m runtime.serve"""

from runtime.serve.cli import main

main(prog_name="python -m runtime.serve")
