"""Tasks that ask for what stands far back in a text: made from a seed, of any length, scored exactly."""
