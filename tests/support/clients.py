"""Libraries that a test needs, and that may not be there."""

from types import ModuleType

import pytest
import torch


def transformers_or_skip() -> ModuleType:
    """Return transformers; skip where it is missing, or refuses this torch as too old.

    It is imported then all the same, and has placeholders for its models.
    """
    transformers: ModuleType = pytest.importorskip("transformers")
    if not transformers.is_torch_available():
        pytest.skip(
            f"transformers {transformers.__version__} does not take torch "
            f"{torch.__version__}",
            allow_module_level=True,
        )
    return transformers
