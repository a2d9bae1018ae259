"""A chat in the terminal: cli.py runs it, conversation.py keeps its history in the KV cache."""
