"""Other projects' codecs of the KV cache as definitions, for `python -m research.evaluate --codecs`."""
