"""Run tests that take `ranks` on ranks: see cases.py."""

import cases
import pytest


def pytest_generate_tests(metafunc):
    if "ranks" in metafunc.fixturenames:
        cases.parametrize(metafunc)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    if "ranks" not in pyfuncitem.fixturenames:
        return None
    cases.run_test(pyfuncitem)
    return True
