"""Code pickled by value keeps the name of its file with every cloudpickle."""

import io
import pickle

import pytest
from paceline import _cloudpickle


def cloudpickled(value):
    file = io.BytesIO()
    _cloudpickle.Pickler(file).dump(value)
    return pickle.loads(file.getvalue())


def test_a_function_by_value_keeps_its_file_and_those_inside_it():
    def outer():
        def inner():
            return 1

        return inner

    sent = cloudpickled(outer)
    assert sent is not outer
    assert sent()() == 1
    for code in (sent.__code__, sent().__code__):
        assert code.co_filename == __file__
    assert sent.__code__ == outer.__code__


def test_methods_and_recursive_functions_by_value_keep_their_file():
    class Local:
        def method(self, n):
            return n and self.method(n - 1)

    sent = cloudpickled(Local)
    assert sent is not None
    assert sent().method(3) == 0
    assert sent.method.__code__.co_filename == __file__


@pytest.mark.parametrize("value", [len, io.BytesIO, [1, {"a": (2,)}], None])
def test_other_values_travel_as_by_cloudpickle(value):
    assert cloudpickled(value) == value
