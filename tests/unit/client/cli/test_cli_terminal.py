"""No text of a document or an answer can act on the terminal."""

import io
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orthros_client.cli.terminal import Terminal, one_line, printable

ATTACKS = {
    "\x1b[31mred\x1b[0m": "\\x1b[31mred\\x1b[0m",
    "\x1b]0;title\x07": "\\x1b]0;title\\x07",
    "\x9b2J": "\\x9b2J",
    "over\rwritten": "overwritten",
    "\u202etxt.exe": "\\u202etxt.exe",
    "\u2066\u2069\u200f": "\\u2066\\u2069\\u200f",
    "back\x08space\x7f\x00": "back\\x08space\\x7f\\x00",
    "\ud800": "\\ud800",
    "[red]markup[/red] :smile:": "[red]markup[/red] :smile:",
    "tab\tand\nline, é 鍵 \U0001f600": "tab\tand\nline, é 鍵 \U0001f600",
}


@pytest.mark.parametrize(("attack", "shown"), ATTACKS.items())
def test_what_could_act_is_shown_as_an_escape(attack, shown):
    assert printable(attack) == shown


@given(st.text(), st.text())
def test_a_stream_may_be_cut_anywhere(left, right):
    assert printable(left) + printable(right) == printable(left + right)


@given(st.text())
def test_nothing_but_tabs_and_line_feeds_controls(text):
    assert all(character in "\t\n" or ord(character) >= 32 for character in printable(text))
    assert not set(printable(text)) & {chr(code) for code in range(0x7F, 0xA0)}


def test_one_line_is_one_line_and_bounded():
    assert one_line("a\n\n b\t\x1b") == "a b \\x1b"
    assert len(one_line("x" * 1000)) == 300


def test_a_terminal_that_cannot_show_a_character_gets_its_escape(monkeypatch):
    buffer = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(buffer, encoding="ascii"))
    Terminal(is_json=False, is_quiet=False).line("é\x1b")
    assert buffer.getvalue() == b"\\xe9\\x1b\n"


def test_a_result_as_json_is_ascii(monkeypatch):
    buffer = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(buffer, encoding="utf-8"))
    Terminal(is_json=True, is_quiet=False).object({"text": "é\x1b\x9b\u202e\n"})
    assert buffer.getvalue() == b'{"text": "\\u00e9\\u001b\\u009b\\u202e\\n"}\n'
