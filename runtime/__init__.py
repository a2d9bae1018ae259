"""The programs of the `subkv` command (cli.py). Flags are named as in llama.cpp."""
