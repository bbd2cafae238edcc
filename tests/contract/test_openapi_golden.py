"""The API's description, frozen: a change of it is a change for every client, so it is reviewed.

After a wanted change: `python tests/contract/test_openapi_golden.py` writes the file anew.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from orthros_service.gateway.app import build_routes

GOLDEN = Path(__file__).with_name("openapi.json")
OPENAI_PATHS = ("/v1/chat/completions", "/v1/models", "/v1/models/{model_id}")
OPERATIONS = ("/healthz", "/readyz", "/metrics")


def render() -> str:
    document = build_routes().openapi()
    # The release number changes with every release; the golden file must not.
    document["info"]["version"] = "0"
    return json.dumps(document, indent=1, sort_keys=True) + "\n"


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return json.loads(render())


def operations(document: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for path, methods in document["paths"].items():
        for operation in methods.values():
            yield path, operation


def walk(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
        for inner in value.values():
            yield from walk(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from walk(inner)


def test_the_api_is_the_one_that_was_reviewed():
    message = f"wanted? then run: python {GOLDEN.parent.name}/{Path(__file__).name}"
    assert render() == GOLDEN.read_text(), message


def test_every_reference_points_at_a_schema_and_every_schema_is_used(document):
    schemas = document["components"]["schemas"]
    used = {
        one["$ref"].removeprefix("#/components/schemas/")
        for one in walk(document)
        if isinstance(one.get("$ref"), str)
    }
    assert used == set(schemas)
    assert "HTTPValidationError" not in schemas


def test_every_operation_is_described(document):
    for path, operation in operations(document):
        assert operation["summary"], path
        assert operation["description"], path
        assert operation["tags"], path
    ids = [operation["operationId"] for _, operation in operations(document)]
    assert len(ids) == len(set(ids))


def test_every_error_has_the_shape_of_its_path(document):
    for path, operation in operations(document):
        errors = {
            status: one for status, one in operation["responses"].items() if int(status) >= 400
        }
        if path not in OPERATIONS:
            assert "500" in errors, path
            assert "503" in errors, path
        for response in errors.values():
            ((kind, content),) = response["content"].items()
            name = content["schema"]["$ref"].rsplit("/", 1)[1]
            expected = (
                ("application/json", "OpenAIError")
                if path in OPENAI_PATHS
                else ("application/problem+json", "Problem")
            )
            assert (kind, name) == expected, path


def test_every_body_documents_what_can_be_wrong_with_it(document):
    for path, operation in operations(document):
        if "requestBody" in operation:
            invalid = {"400"} if path in OPENAI_PATHS else {"400", "422"}
            assert invalid | {"413", "415"} <= set(operation["responses"]), path


if __name__ == "__main__":
    GOLDEN.write_text(render())
