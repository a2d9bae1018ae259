"""python -m runtime.doctor"""

from runtime.doctor.cli import main

main(prog_name="python -m runtime.doctor")
