"""The only folder that uses private names of torch or depends on its version.

Each ``torch_*.py`` covers one area of torch; ``sparse_rows.py`` and
``packed_sequence.py`` turn tensors that the core cannot read into ones that it can.
"""
