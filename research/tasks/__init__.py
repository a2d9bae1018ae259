"""Tasks about information far back in a text, generated from a seed for any length and scored exactly."""
