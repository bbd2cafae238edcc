"""A job says exactly one thing to do, in values of the right types."""

import pytest

from orthros_service.errors import InvalidTextError, InvalidValueError
from orthros_service.jobs.spec import build_spec

PATHS = {"input": "in", "output": "out"}


@pytest.mark.parametrize(
    "task",
    [
        {},
        {"question": "What?", "summarize": True},
        {"question": "What?", "question_column": "q"},
        {"question_column": "q", "summarize": True},
    ],
)
def test_none_or_several_tasks_are_refused(task):
    with pytest.raises(InvalidValueError, match="exactly one of question"):
        build_spec(**PATHS, **task)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", "64"),
        ("max_tokens", True),
        ("concurrency", -1),
        ("limit", 0),
        ("row_deadline_s", float("nan")),
        ("row_deadline_s", 0.0),
        ("prefill_mode", "fast"),
        ("input", ""),
        ("question", ""),
        ("unknown", 1),
    ],
)
def test_a_value_that_is_not_allowed_is_refused_with_its_name(field, value):
    with pytest.raises(InvalidValueError, match=field):
        build_spec(**{**PATHS, "question": "What?", field: value})


def test_a_question_must_be_visible_and_without_nul():
    with pytest.raises(InvalidValueError, match="question"):
        build_spec(**PATHS, question=" \n")
    with pytest.raises(InvalidTextError):
        build_spec(**PATHS, question="a\0b")
