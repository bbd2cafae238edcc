"""Errors cross processes and the network: they pickle whole, and their codes name one kind each."""

import http
import importlib
import inspect
import pickle
import pkgutil
import re

import pytest

import orthros_client
import orthros_service
from orthros_service.errors import OrthrosError

CLIENT_CLOSED_REQUEST = 499  # not registered, but what proxies use for a caller that left


def _kinds() -> list[type[OrthrosError]]:
    found: list[type[OrthrosError]] = [OrthrosError]
    for kind in found:
        found.extend(sub for sub in kind.__subclasses__() if sub not in found)
    return found


KINDS = [kind for kind in _kinds() if kind.__module__ == "orthros_service.errors"]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_an_error_survives_pickling_with_everything_it_says(kind: type[OrthrosError]) -> None:
    error = kind("Too long: at most 5.", phase="prefill", limit=5, actual=7)
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert str(copy) == copy.message == "Too long: at most 5."
    assert copy.phase == "prefill"
    assert copy.details == {"limit": 5, "actual": 7}
    assert (copy.code, copy.status, copy.is_retryable) == (
        kind.code,
        kind.status,
        kind.is_retryable,
    )


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_kind_has_a_code_of_its_own_and_a_status_for_errors(kind: type[OrthrosError]) -> None:
    assert "code" in vars(kind), "state the code of this kind, or raise its parent"
    assert re.fullmatch(r"[a-z][a-z0-9_]*", kind.code)
    assert [other.__name__ for other in KINDS if other.code == kind.code] == [kind.__name__]
    if kind.status != CLIENT_CLOSED_REQUEST:
        assert http.HTTPStatus(kind.status) >= http.HTTPStatus.BAD_REQUEST


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_kind_has_a_docstring(kind: type[OrthrosError]) -> None:
    assert inspect.getdoc(kind)


def test_all_kinds_are_defined_in_one_file() -> None:
    for info in pkgutil.walk_packages(orthros_service.__path__, "orthros_service."):
        importlib.import_module(info.name)
    ours = [kind for kind in _kinds() if kind.__module__.startswith("orthros_service.")]
    assert ours == KINDS


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_the_client_raises_the_class_of_the_same_name(kind: type[OrthrosError]) -> None:
    assert getattr(orthros_client, kind.__name__).default_code == kind.code
