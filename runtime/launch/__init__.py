"""Runs programs on our libraries: reads their arguments, sets their environment, starts them."""
