"""The command line: ``paceline``, and ``python -m paceline``."""
