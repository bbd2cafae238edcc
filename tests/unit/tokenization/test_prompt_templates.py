from datetime import UTC, datetime

import pytest
from tokenizers import Tokenizer as RawTokenizer

from orthros_service.errors import ModelError
from orthros_service.tokenization import PromptFormat, Tokenizer
from orthros_service.types import Message


def system(content):
    return Message(role="system", content=content)


def user(content):
    return Message(role="user", content=content)


def assistant(content):
    return Message(role="assistant", content=content)


def decode(prompt_format, ids):
    return prompt_format._tokenizer.decode(ids, skip_special_tokens=False)


@pytest.fixture(scope="session")
def make_format(tmp_path_factory, tiny_tokenizer, write_tokenizer_dir):
    """Build the prompt format of the tiny tokenizer behind some chat template."""

    def make(template, **arguments):
        raw = RawTokenizer.from_str(tiny_tokenizer.to_str())
        raw.add_special_tokens(["<|sep|>"])
        directory = write_tokenizer_dir(
            tmp_path_factory.mktemp("format"), raw, chat_template=template
        )
        return PromptFormat(Tokenizer.from_directory(directory), **arguments)

    return make


def test_a_templates_date_is_fixed_before_documents_and_real_in_a_chat(make_format):
    template = (
        "{% for m in messages %}<|im_start|>{% if loop.first %}{{ strftime_now('%Y') }}|{% endif %}"
        "{{ m.content }}<|im_end|>{% endfor %}"
    )
    prompt_format = make_format(template, clock=lambda: datetime(2031, 5, 1, tzinfo=UTC))
    header = decode(prompt_format, prompt_format.header_ids.tolist())
    assert header.startswith("<|im_start|>2025|")
    assert decode(prompt_format, prompt_format.chat([user("q")])) == "<|im_start|>2031|q<|im_end|>"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('never') }}", "never"),
        ("no contents", "print each content once"),
        ("{{ messages[0].content }}{{ messages[0].content }}", "print each content once"),
        ("{{ messages[0].missing.field }}", "does not render"),
        ("{{ ''.__class__.__mro__ }}", "does not render"),
        ("{% set _ = messages.append(1) %}", "does not render"),
    ],
)
def test_a_template_that_cannot_be_used_is_refused(make_format, template, message):
    with pytest.raises(ModelError, match=message):
        make_format(template)


def test_a_template_that_opens_longer_conversations_otherwise_is_refused_for_them(make_format):
    prompt_format = make_format(
        "{% if messages | length > 3 %}<|sep|>{% endif %}"
        "{% for m in messages if m.role != 'system' %}{{ m.content }}<|im_end|>{% endfor %}"
    )
    assert prompt_format.document_tail([user("q")])
    with pytest.raises(ModelError, match="opens this conversation in another way"):
        prompt_format.document_tail(
            [user("q"), assistant("a"), user("q"), assistant("a"), user("q")]
        )


def test_generation_blocks_and_loop_controls_are_rendered(make_format):
    prompt_format = make_format(
        "{% for m in messages %}{% if m.role == 'system' %}<|im_start|>{{ m.content }}<|sep|>"
        "{% continue %}{% endif %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
        "{% endfor %}"
    )
    text = decode(prompt_format, prompt_format.chat([system("s"), user("q")]))
    assert text == "<|im_start|>s<|sep|>q<|im_end|>"
