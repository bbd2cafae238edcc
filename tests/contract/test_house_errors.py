"""Errors cross processes and the network: they pickle whole, and their codes name one kind each."""

import http
import importlib
import inspect
import pickle
import pkgutil
import re

import pytest

import orthros_service
from orthros_service.errors import OrthrosError

CLIENT_CLOSED_REQUEST = 499  # not registered, but what proxies use for a caller that left

# Kinds that callers need not tell from their parent: they share its code on purpose.
SHARE_THE_CODE_OF_THEIR_PARENT = {
    "DocumentFailedError",  # the parent, but trying again does not help
    "InvalidFieldsError",  # the parent, with one entry per field
    "StoppingError",  # the parent, but expected: it is no error of the log
}


@pytest.fixture(scope="module")
def kinds() -> list[type[OrthrosError]]:
    for info in pkgutil.walk_packages(orthros_service.__path__, "orthros_service."):
        importlib.import_module(info.name)
    found: list[type[OrthrosError]] = [OrthrosError]
    for kind in found:
        found.extend(sub for sub in kind.__subclasses__() if sub not in found)
    return [kind for kind in found if kind.__module__.startswith("orthros_service.")]


def test_an_error_survives_pickling_with_everything_it_says(kinds) -> None:
    for kind in kinds:
        takes_details = "details" in inspect.signature(kind).parameters
        said = {"phase": "prefill", "limit": 5, "actual": 7} if takes_details else {}
        error = kind("Too long: at most 5.", **said)
        copy = pickle.loads(pickle.dumps(error))
        assert type(copy) is kind
        assert str(copy) == "Too long: at most 5."
        assert vars(copy) == vars(error), kind
        if takes_details:
            assert (copy.phase, copy.details) == ("prefill", {"limit": 5, "actual": 7})


def test_every_kind_has_a_code_of_its_own_or_shares_one_on_purpose(kinds) -> None:
    without = {kind.__name__ for kind in kinds if "code" not in vars(kind)}
    assert without == SHARE_THE_CODE_OF_THEIR_PARENT
    codes = [kind.code for kind in kinds if "code" in vars(kind)]
    assert sorted(codes) == sorted(set(codes))
    assert [code for code in codes if not re.fullmatch(r"[a-z][a-z0-9_]*", code)] == []


def test_every_kind_has_a_status_for_errors_and_a_docstring(kinds) -> None:
    for kind in kinds:
        if kind.status != CLIENT_CLOSED_REQUEST:
            assert http.HTTPStatus(kind.status) >= http.HTTPStatus.BAD_REQUEST, kind
        assert vars(kind).get("__doc__"), kind
