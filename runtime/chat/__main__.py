"""python -m runtime.chat"""

from runtime.chat.program import main

main(prog_name="python -m runtime.chat")
