"""The tree of exceptions: what is caught by whom, and that it travels."""

import inspect
import pickle

import pytest

from odsgd_kvstore import errors

TREE = {
    "ODSGDError": (Exception,),
    "ConfigError": (errors.ODSGDError, ValueError),
    "EnvironmentNotSupported": (errors.ODSGDError, ImportError),
    "NotSupportedYet": (errors.ODSGDError, NotImplementedError),
    "LaunchError": (errors.ODSGDError, RuntimeError),
    "JobError": (errors.ODSGDError, RuntimeError),
    "HandshakeError": (errors.JobError,),
    "MismatchError": (errors.JobError,),
    "ServerError": (errors.JobError,),
    "JobTimeout": (errors.JobError, TimeoutError),
}


def classes():
    """The exceptions that the module defines."""
    found = inspect.getmembers(errors, inspect.isclass)
    return {name: kind for name, kind in found if kind.__module__ == errors.__name__}


def test_tree_is_as_agreed():
    assert {name: kind.__bases__ for name, kind in classes().items()} == TREE


def test_tree_is_drawn_in_the_docstring():
    for name, kind in classes().items():
        assert name in errors.__doc__
        for base in kind.__bases__:
            if base not in (Exception, errors.ODSGDError, errors.JobError):
                assert f"{name} ({base.__name__})" in errors.__doc__


@pytest.mark.parametrize("name", sorted(TREE))
def test_exception_travels_between_processes(name):
    error = pickle.loads(pickle.dumps(classes()[name]("what, allowed, remedy")))
    assert type(error) is classes()[name]
    assert str(error) == "what, allowed, remedy"


@pytest.mark.parametrize("name", sorted(TREE))
def test_each_has_a_docstring_of_its_own(name):
    assert classes()[name].__dict__["__doc__"].strip().endswith(".")
