"""Programs of research, run from a checkout as `python -m research.NAME`. No program of the wheel imports them."""
