"""``python -m paceline``."""
