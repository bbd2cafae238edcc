"""The client's public face: what it exports, and that it says the same as the service."""

import inspect
import subprocess
import sys
from typing import get_type_hints

import httpx
import pytest

import orthros_client
import orthros_service.errors as service_errors
from orthros_client import (
    AnswerStream,
    AsyncAnswerStream,
    AsyncOrthrosClient,
    OrthrosClient,
    cli,
    errors,
)
from orthros_client.documents import AsyncDocuments, Documents
from orthros_client.options import AskOptions, SummaryOptions
from orthros_client.types import AnswerRequest, SummaryRequest


def _error_classes(module):
    root = module.OrthrosError
    return {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, root)
    }


@pytest.mark.parametrize("module", [orthros_client, cli])
def test_all_is_sorted_complete_and_importable(module):
    assert module.__all__ == sorted(set(module.__all__))
    public = {
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and not inspect.ismodule(value)
    }
    assert public == set(module.__all__)


def test_every_error_is_exported():
    assert set(_error_classes(errors)) <= set(orthros_client.__all__)


@pytest.mark.parametrize("name", sorted(_error_classes(service_errors)))
def test_each_error_of_the_service_has_its_twin(name):
    theirs = _error_classes(service_errors)[name]
    ours = _error_classes(errors)[name]
    assert ours.default_code == theirs.code
    assert [cls.__name__ for cls in ours.__mro__] == [cls.__name__ for cls in theirs.__mro__]


def test_the_clients_own_codes_are_none_of_the_services():
    theirs = {cls.code for cls in _error_classes(service_errors).values()}
    own = set(_error_classes(errors)) - set(_error_classes(service_errors))
    assert own == {
        "ConnectionFailedError",
        "ResponseTimeoutError",
        "StreamBrokenError",
        "UnexpectedResponseError",
    }
    assert not {getattr(errors, name).default_code for name in own} & theirs


def test_every_httpx_error_is_mapped():
    from orthros_client._problems import httpx_errors_mapped

    for name in httpx.__all__:
        cls = getattr(httpx, name)
        if not (isinstance(cls, type) and issubclass(cls, httpx.HTTPError)):
            continue
        if cls is httpx.HTTPStatusError:
            continue
        with pytest.raises(errors.OrthrosError), httpx_errors_mapped("http://host"):
            raise cls("x")


@pytest.mark.parametrize(
    ("options", "request_type", "apart"),
    [
        (AskOptions, AnswerRequest, {"question", "stream"}),
        (SummaryOptions, SummaryRequest, {"stream"}),
    ],
)
def test_options_are_the_fields_of_the_wire_types(options, request_type, apart):
    assert set(get_type_hints(options)) == set(request_type.model_fields) - apart


def _parameters(function):
    return inspect.signature(function).parameters.values()


@pytest.mark.parametrize(
    ("sync", "asynchronous"),
    [
        (OrthrosClient, AsyncOrthrosClient),
        (Documents, AsyncDocuments),
        (AnswerStream, AsyncAnswerStream),
    ],
)
def test_both_clients_have_the_same_methods_and_arguments(sync, asynchronous):
    def methods(cls):
        return {
            name: [(p.name, p.kind, p.default) for p in _parameters(value)]
            for name, value in vars(cls).items()
            if inspect.isfunction(value) and not name.startswith("_")
        }

    assert methods(sync) == methods(asynchronous)
    for cls in (sync, asynchronous):
        assert all(getattr(cls, name).__doc__ for name in methods(cls))


def test_importing_the_client_loads_no_commands_and_nothing_heavy():
    script = (
        "import sys, orthros_client; "
        "print([n for n in ('typer', 'torch', 'ray', 'numpy', 'fastapi', "
        "'orthros_service', 'orthros_kernels') if n in sys.modules])"
    )
    command = [sys.executable, "-c", script]
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout == "[]\n"
