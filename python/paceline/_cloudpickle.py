"""cloudpickle, with which code that goes by value keeps the name of its file.

cloudpickle from 3.1.3 on writes another name, so that bytes do not depend on a cell's.
Then a traceback of what was sent shows neither the file nor the line.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import cloudpickle  # type: ignore[import-untyped]


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles as cloudpickle does, and what code is called beside it."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is types.CodeType:
            make, arguments = self.dispatch_table[types.CodeType](value)
            return _make_code, (make, arguments, value.co_filename)
        return super().reducer_override(value)


def _make_code(
    make: Callable[..., types.CodeType], arguments: tuple[Any, ...], file: str
) -> types.CodeType:
    return make(*arguments).replace(co_filename=file)
