"""The examples in docstrings run and print what they show."""

import doctest
import importlib
import pkgutil

import paceline
import pytest
from support.prints import without_gloo

FINDER = doctest.DocTestFinder(exclude_empty=True)


def modules():
    for found in pkgutil.walk_packages(paceline.__path__, "paceline."):
        if found.name != "paceline.__main__":
            yield importlib.import_module(found.name)


def examples():
    """Return all modules' examples; public classes name `paceline` as their module."""
    found = [example for module in modules() for example in FINDER.find(module)]
    for name in paceline.__all__:
        found += FINDER.find(getattr(paceline, name), name, module=False)
    return {example.name: example for example in found if example.examples}


EXAMPLES = examples()


def test_examples_are_found_wherever_users_read_them():
    names = {name.rpartition(".")[2] for name in EXAMPLES}
    assert names >= {"DataParallel", "DistributedDataParallel", "install", "no_sync"}


class ReadsPastGloo(doctest.OutputChecker):
    def check_output(self, want, got, optionflags):
        return super().check_output(want, without_gloo(got), optionflags)


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_says_what_happens(name):
    runner = doctest.DocTestRunner(ReadsPastGloo())
    runner.run(EXAMPLES[name])
    assert runner.summarize().failed == 0
