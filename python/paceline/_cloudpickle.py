"""cloudpickle, but code that is pickled by value keeps the name of its file.

cloudpickle from 3.1.3 on replaces the name, so that the bytes do not depend on it.
Then a traceback through unpickled code shows neither the file nor the line.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import cloudpickle  # type: ignore[import-untyped]


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles as cloudpickle does, with the file name of each code object."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is types.CodeType:
            make, arguments = self.dispatch_table[types.CodeType](value)
            return _make_code, (make, arguments, value.co_filename)
        return super().reducer_override(value)


def _make_code(
    make: Callable[..., types.CodeType], arguments: tuple[Any, ...], file: str
) -> types.CodeType:
    return make(*arguments).replace(co_filename=file)
