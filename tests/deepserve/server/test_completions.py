"""POST /v1/completions through the openai client."""

import pytest

from deepserve.engine.request import SequenceOutput
from deepserve.server.prepare import ENCODE_IN_THREAD_CHARS
from tests.deepserve.server.conftest import TEXT, joined, position

MODEL_NAME = "deepserve-tiny"


def complete(server, **body):
    return server.openai.completions.create(**{"model": MODEL_NAME, "prompt": "Hello", "max_tokens": 100, **body})


def streamed(server, **body) -> tuple[dict[int, str], dict[int, str], list]:
    """Text and finish reason of each choice, and all chunks."""
    text, reasons, chunks = {}, {}, list(complete(server, stream=True, **body))
    for chunk in chunks:
        for choice in chunk.choices:
            text[choice.index] = text.get(choice.index, "") + choice.text
            if choice.finish_reason:
                assert choice.index not in reasons
                reasons[choice.index] = choice.finish_reason
    return text, reasons, chunks


def test_whole(server):
    engine = server.engine()
    engine.num_cached_tokens = 1
    answer = complete(server, seed=5)
    choice = answer.choices[0]
    assert (choice.text, choice.finish_reason, choice.stop_reason, choice.seed) == (TEXT, "stop", None, 5)
    assert answer.id.startswith("cmpl-") and answer.model == MODEL_NAME and answer.system_fingerprint == "tiny-abc-w7"
    num_prompt = len(server.encode("Hello")) + 1
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (num_prompt, len(engine.reply))
    assert usage.total_tokens == num_prompt + len(engine.reply)
    assert usage.prompt_tokens_details.cached_tokens == 1
    assert engine.submitted[0].prompt_token_ids == [0, *server.encode("Hello")]


def test_streamed(server):
    engine = server.engine()
    text, reasons, chunks = streamed(server, stream_options={"include_usage": True})
    assert (text, reasons) == ({0: TEXT}, {0: "stop"})
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == len(engine.reply)
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1


def test_stream_ends_with_done(server):
    server.engine()
    answer = server.http.post("/v1/completions", json={"prompt": "Hello", "stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = answer.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""] and all(event.startswith("data: {") for event in events[:-2])


def test_default_max_tokens_is_openais(server):
    engine = server.engine(reply=[100, 101])
    answer = server.openai.completions.create(model=MODEL_NAME, prompt="Hello")
    assert answer.usage.completion_tokens == 16 and answer.choices[0].finish_reason == "length"
    assert engine.submitted[0].params.max_tokens == 16


def test_sampling_defaults_come_from_the_model(serve):
    for config, temperature, top_p in (("auto", 0.6, 0.95), ("none", 1.0, 1.0)):
        server = serve(generation_config=config)
        engine = server.engine()
        complete(server)
        complete(server, temperature=0.25)
        assert [(s.params.temperature, s.params.top_p) for s in engine.submitted] == [(temperature, top_p), (0.25, top_p)]


def test_every_sampling_field_reaches_the_engine(server):
    engine = server.engine()
    extra = {
        "top_k": 5, "min_p": 0.125, "repetition_penalty": 1.5, "ignore_eos": True, "stop_token_ids": [9], "min_tokens": 2,
        "skip_special_tokens": False, "include_stop_str_in_output": True, "cache_salt": "s",
    }  # fmt: skip
    complete(
        server, n=2, temperature=0.5, top_p=0.75, presence_penalty=0.25, frequency_penalty=-0.25, logit_bias={"7": 1.5}, seed=-3,
        max_tokens=4, best_of=2, extra_body=extra,
    )  # fmt: skip
    (submit,) = engine.submitted
    params = submit.params
    assert submit.cache_salt == "s"
    assert (params.n, params.temperature, params.top_p, params.seed, params.max_tokens) == (2, 0.5, 0.75, -3, 4)
    assert (params.presence_penalty, params.frequency_penalty, params.logit_bias) == (0.25, -0.25, {7: 1.5})
    for name, value in extra.items():
        assert name == "cache_salt" or getattr(params, name) == value


def test_prompt_forms_and_choice_order(server):
    engine = server.engine()
    ids = server.encode("Hi you")
    forms = ["Hi", ["Hi", "you"], ids, [ids, ids[:1], ids]]
    for prompt, num_prompts in zip(forms, (1, 2, 1, 3), strict=True):
        answer = complete(server, prompt=prompt, n=2)
        assert [choice.index for choice in answer.choices] == list(range(2 * num_prompts))
        assert all(choice.text == TEXT for choice in answer.choices)
        text, _, _ = streamed(server, prompt=prompt, n=2)
        assert text == dict.fromkeys(range(2 * num_prompts), TEXT)
    assert engine.submitted[-1].prompt_token_ids == ids
    assert complete(server, prompt=["Hi", "you"], echo=True).choices[1].text == "you" + TEXT


def test_prompts_without_a_seed_draw_their_own(server):
    engine = server.engine()
    answer = complete(server, prompt=["Hi", "Hi"])
    seeds = [submit.params.seed for submit in engine.submitted]
    assert len(set(seeds)) == 2 and [choice.seed for choice in answer.choices] == seeds and max(seeds) < 2**53


@pytest.mark.parametrize("tokens_per_step", [1, 3, 64])
def test_stop_string_over_token_boundaries(server, tokens_per_step):
    engine = server.engine(tokens_per_step=tokens_per_step)
    assert len(server.encode("two, th")) > 2
    for stop, expected in ((["two, th"], "Grüße, 世界! One, "), (["界"], "Grüße, 世"), (["x", "😀"], "Grüße, 世界! One, two, three ")):
        whole = complete(server, stop=stop).choices[0]
        assert (whole.text, whole.finish_reason, whole.stop_reason) == (expected, "stop", stop[-1])
        included = complete(server, stop=stop, extra_body={"include_stop_str_in_output": True}).choices[0].text
        assert included == expected + stop[-1]
        text, reasons, _ = streamed(server, stop=stop)
        assert (text, reasons) == ({0: expected}, {0: "stop"})
    num_tokens = complete(server, stop=["界"]).usage.completion_tokens
    assert server.tokenizer.decode(engine.reply[:num_tokens]) == "Grüße, 世界"


def test_stop_string_aborts_in_the_engine(server):
    engine = server.engine(hold_after=20)
    assert len(server.encode("Grüße, 世界! One")) < 20
    assert complete(server, stop=["One"]).choices[0].text == "Grüße, 世界! "
    engine.wait_for(lambda: engine.aborted == [engine.submitted[0].request_id], "abort of the stopped request")


def test_stop_string_with_n_lets_the_other_sequences_finish(server):
    engine = server.engine(hold_after=0)
    answer = server.in_background(lambda: streamed(server, n=2, stop=["One"]))
    engine.wait_for(lambda: engine.submitted, "submission")
    request_id = engine.submitted[0].request_id
    one, rest = server.encode("One"), server.encode("Two Three")
    engine.send(SequenceOutput(request_id, 0, one), SequenceOutput(request_id, 1, rest[:1]))
    engine.send(SequenceOutput(request_id, 0, rest), SequenceOutput(request_id, 1, rest[1:]))
    assert engine.aborted == []
    engine.send(SequenceOutput(request_id, 1, one))
    text, reasons, _ = answer.result(10)
    assert (text, reasons) == ({0: "", 1: "Two Three"}, {0: "stop", 1: "stop"})
    engine.wait_for(lambda: engine.aborted == [request_id], "abort of the stopped request")


def test_min_tokens_protect_from_stop_strings(server):
    server.engine()
    num_tokens = len(server.encode("Grüße, 世界! One"))
    answer = complete(server, stop=["e"], extra_body={"min_tokens": num_tokens})
    assert answer.choices[0].text == "Grüße, 世界! One, two, thr"


def test_characters_are_never_cut(server):
    engine = server.engine()
    assert any("�" in server.tokenizer.decode([token]) for token in engine.reply)
    _, _, chunks = streamed(server)
    assert all("�" not in chunk.choices[0].text for chunk in chunks)


def test_stop_token_is_no_text(server):
    server.engine(reply=[*server.encode("One two"), 1])
    special = {"skip_special_tokens": False}
    assert complete(server, extra_body=special).choices[0].text == "One two"
    ended = complete(server, extra_body={**special, "include_stop_str_in_output": True}).choices[0].text
    assert ended == "One two<｜end▁of▁sentence｜>"


def test_logprobs(server):
    engine = server.engine()
    answer = complete(server, logprobs=2, max_tokens=6)
    logprobs = answer.choices[0].logprobs
    ids = engine.reply[:6]
    assert logprobs.tokens == [server.tokenizer.id_to_text(i) for i in ids]
    assert logprobs.token_logprobs == [-1.0] * 6
    assert logprobs.text_offset[0] == 0 and logprobs.text_offset == sorted(logprobs.text_offset)
    assert logprobs.top_logprobs[0] == {server.tokenizer.id_to_text(ids[0] + 1): -0.5, server.tokenizer.id_to_text(ids[0]): -1.0}
    chunks = streamed(server, logprobs=2, max_tokens=6)[2]
    parts = [chunk.choices[0].logprobs for chunk in chunks]
    for name in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
        assert joined(getattr(part, name) for part in parts) == getattr(logprobs, name)


def test_offsets_point_into_the_text(server):
    server.engine()
    choice = complete(server, prompt="Straße 😀", echo=True, logprobs=0).choices[0]
    starts = choice.logprobs.text_offset
    for start, end, token in zip(starts, [*starts[1:], len(choice.text)], choice.logprobs.tokens, strict=True):
        if "�" not in token and not token.startswith("<｜"):
            assert choice.text[start:end] in (token, "")
    assert choice.text == "Straße 😀" + TEXT


@pytest.mark.parametrize("stream", [False, True])
def test_echo_scores_the_prompt(server, stream):
    server.engine()
    ids = server.encode("One two three")
    answer = complete(server, prompt=ids, echo=True, logprobs=1, max_tokens=0, n=2, stream=stream)
    choices = [chunk.choices[0] for chunk in answer] if stream else answer.choices
    assert len(choices) == 2
    for choice in choices:
        assert (choice.text, choice.finish_reason) == ("One two three", "length")
        assert choice.logprobs.tokens == [server.tokenizer.id_to_text(i) for i in ids]
        assert choice.logprobs.token_logprobs == [None, *[-1.0] * (len(ids) - 1)]
        assert choice.logprobs.top_logprobs[0] is None and len(choice.logprobs.top_logprobs) == len(ids)


def test_prompt_logprobs_and_token_ids(server):
    engine = server.engine()
    ids = server.encode("One two")
    choice = complete(server, prompt=ids, max_tokens=2, extra_body={"prompt_logprobs": 1, "return_token_ids": True}).choices[0]
    assert choice.prompt_token_ids == ids and choice.token_ids == engine.reply[:2]
    expected = position(ids[1], 1)
    first = {"logprob": expected.logprobs[0], "rank": 2, "decoded_token": server.tokenizer.id_to_text(ids[1])}
    likeliest = {"logprob": -0.5, "rank": 1, "decoded_token": server.tokenizer.id_to_text(ids[1] + 1)}
    assert choice.prompt_logprobs == [None, *choice.prompt_logprobs[1:]]
    assert choice.prompt_logprobs[1] == {str(ids[1]): first, str(ids[1] + 1): likeliest}
    chunks = streamed(server, prompt=ids, max_tokens=2, extra_body={"prompt_logprobs": 1, "return_token_ids": True})[2]
    assert joined(chunk.choices[0].token_ids for chunk in chunks) == engine.reply[:2]
    assert chunks[0].choices[0].prompt_token_ids == ids


def test_usage_in_every_chunk(server):
    server.engine()
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(complete(server, stream=True, extra_body={"stream_options": options}))
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts) and counts[0] >= 1


def test_request_id_header_comes_back(server):
    server.engine()
    answer = server.http.post("/v1/completions", json={"prompt": "Hi"}, headers={"x-request-id": "abc-1"})
    assert answer.headers["x-request-id"] == "abc-1"


def test_long_prompts_are_encoded_in_a_thread(server):
    engine = server.engine(num_pages=1000)
    text = "one two three " * 1200
    assert len(text) > ENCODE_IN_THREAD_CHARS
    assert complete(server, prompt=text[:-1], max_tokens=1).usage.prompt_tokens == len(engine.submitted[0].prompt_token_ids)
    assert engine.submitted[0].prompt_token_ids == [0, *server.encode(text[:-1])]
