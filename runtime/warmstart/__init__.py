"""Warm start: a first token from the summarised cache of a similar prompt. Experimental; off by default."""
