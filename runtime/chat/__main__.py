"""python -m runtime.chat"""

from runtime.chat.cli import main

main(prog_name="python -m runtime.chat")
