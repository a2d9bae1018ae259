"""A chat in the terminal: cli.py runs it, conversation.py keeps what was said in the KV cache."""
