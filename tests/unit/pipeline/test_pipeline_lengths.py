import pytest

from orthros_service.errors import (
    ContextTooLongError,
)
from orthros_service.types import Message


@pytest.mark.parametrize(("num_letters", "allowed"), [(10, 50), (1459, 40), (1498, 1)])
async def test_max_tokens_is_clamped_to_what_the_tail_holds(world, num_letters, allowed):
    events = await world.collect(world.request("text", question="q" * num_letters))

    assert world.decoder.works[0].sampling.max_tokens == allowed
    assert events[-1].max_tokens == allowed


async def test_max_tokens_is_clamped_to_what_the_context_holds(world):
    events = await world.collect(world.request("x" * 3970, question="q" * 9))

    assert events[-1].max_tokens == 4000 - 3980 - 10
    assert world.decoder.works[0].sampling.max_tokens == 10


async def test_a_tail_without_room_for_an_answer_is_refused_before_any_prefill(world):
    with pytest.raises(ContextTooLongError) as caught:
        await world.collect(world.request("text", question="q" * 1499))

    assert caught.value.details == {"limit": 1500, "actual": 1501}
    assert world.coordinator.sources == []


async def test_documents_that_fill_the_context_are_refused(world):
    with pytest.raises(ContextTooLongError) as caught:
        await world.collect(world.request("x" * 2000, "y" * 1976, question="abc"))

    assert caught.value.details == {"limit": 4000, "actual": 4001}
    assert world.decoder.works == []


async def test_a_short_chat_is_all_tail(world):
    events = await world.collect(world.request(question="q" * 998, max_tokens=50))

    assert world.coordinator.sources == []
    assert len(world.decoder.works[0].tail_ids) == 1000
    assert (events[-1].document_tokens, events[-1].prompt_tokens) == (0, 1000)
    assert events[-1].timings.prefill_s == 0.0


async def test_a_long_chat_prefills_whole_tiles_and_keeps_the_end_in_decode_mode(world):
    history = [
        Message(role="user", content="a" * 2000),
        Message(role="assistant", content="b" * 100),
        Message(role="user", content="c" * 20),
    ]
    events = await world.collect(world.request(messages=history))

    (prefix,) = world.coordinator.sources
    work = world.decoder.works[0]
    num_tokens = 2000 + 100 + 20 + 4
    assert prefix.mode == "linear"
    assert len(prefix.token_ids) % 128 == 0
    assert len(prefix.token_ids) + len(work.tail_ids) == num_tokens
    assert 512 <= len(work.tail_ids) < 512 + 128
    assert prefix.token_ids.tolist()[-1] == ord("a")
    assert prefix.char_ends.tolist() == [0] * len(prefix.token_ids)
    assert (events[-1].document_tokens, events[-1].prompt_tokens) == (0, num_tokens)


async def test_a_short_last_turn_stays_whole_in_decode_mode(world):
    history = [
        Message(role="user", content="a" * 2000),
        Message(role="assistant", content="b"),
        Message(role="user", content="c" * 900),
    ]
    await world.collect(world.request(messages=history))

    tail = world.decoder.works[0].tail_ids
    assert 902 <= len(tail) < 902 + 128
    assert tail[-902:] == (1, *[ord("c")] * 900, 2)


async def test_a_last_turn_that_is_the_long_text_is_prefilled_too(world):
    await world.collect(world.request(question="t" * 3000 + "why?"))

    assert 512 <= len(world.decoder.works[0].tail_ids) < 512 + 128


async def test_a_chat_that_fits_full_attention_but_not_the_tail_is_prefilled_in_full_mode(world):
    world.build(max_tail_tokens=900)
    events = await world.collect(world.request(question="q" * 900))

    (prefix,) = world.coordinator.sources
    assert prefix.mode == "full"
    assert events[-1].max_tokens == 50


async def test_a_chat_too_long_to_be_prefilled_within_one_request_is_refused_before_any_prefill(
    world,
):
    world.build(max_chat_tokens=2500)
    await world.collect(world.request(question="q" * 2498))
    num_sources = len(world.coordinator.sources)
    with pytest.raises(ContextTooLongError, match="Upload") as caught:
        await world.collect(world.request(question="q" * 2499))

    assert caught.value.details == {"limit": 2500, "actual": 2501}
    assert "2501 tokens" in caught.value.message
    assert len(world.coordinator.sources) == num_sources
    # A document may be longer.
    await world.collect(world.request("x" * 3000))


async def test_a_chat_that_fits_full_attention_is_never_too_long(world):
    world.build(max_chat_tokens=10)
    await world.collect(world.request(question="q" * 998))
    with pytest.raises(ContextTooLongError) as caught:
        await world.collect(world.request(question="q" * 999))

    assert caught.value.details["limit"] == 1000


async def test_equal_prefixes_share_a_key_and_others_do_not(world):
    for index, question in enumerate(["t" * 3000 + "why", "t" * 3000 + "who", "u" * 3000 + "why"]):
        await world.collect(world.request(question=question, request_id=f"r{index}"))

    first, second, third = (source.content_key for source in world.coordinator.sources)
    assert first == second != third
    assert len(first) == 64


async def test_a_chat_over_the_context_is_refused_before_any_prefill(world):
    with pytest.raises(ContextTooLongError) as caught:
        await world.collect(world.request(question="q" * 4000))

    assert caught.value.details["limit"] == 4000
    assert world.coordinator.sources == []
