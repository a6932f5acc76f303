"""Libraries that a test needs, and that may be missing."""

from types import ModuleType

import pytest
import torch


def transformers_or_skip() -> ModuleType:
    """Return transformers; skip if it is missing, or refuses this torch as too old.

    With an old torch it can still be imported, but its models are placeholders.
    """
    transformers: ModuleType = pytest.importorskip("transformers")
    if not transformers.is_torch_available():
        pytest.skip(
            f"transformers {transformers.__version__} does not take torch "
            f"{torch.__version__}",
            allow_module_level=True,
        )
    return transformers
