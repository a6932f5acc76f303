"""What the tests of several folders share; `tests/conftest.py` makes it importable."""
