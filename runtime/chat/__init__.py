"""A chat in the terminal: program.py runs it, conversation.py keeps what was said in the KV cache."""
