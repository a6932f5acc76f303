"""What of torch is private, or differs by version: the only folder that knows.

``torch_*.py`` each ask one area of torch; ``sparse_rows.py`` and ``packed_sequence.py``
turn tensors that the core does not know into ones that it does.
"""
