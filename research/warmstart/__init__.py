"""Warm start: a first token from the summarised cache of a similar prompt. Experimental; off by default."""

MODES = ("off", "on", "auto")
THRESHOLD = 0.9  # cosine
MAX_KL = 0.05  # nats
