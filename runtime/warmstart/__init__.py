"""Warm start: a first token from the summarised cache of a similar prompt. Experimental; off by default."""

# why a start is cold, in one word; "warm" stands beside them in metrics
CAUSES = ("prompt", "prefix", "library", "similarity", "guard", "error")
