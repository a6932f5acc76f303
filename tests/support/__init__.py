"""Helpers of tests in several folders; `tests/conftest.py` makes them importable."""
