"""POST /v1/chat/completions through the openai client."""

import pytest

from deepserve.server.prepare import ENCODE_IN_THREAD_CHARS
from tests.deepserve.server.conftest import TEXT, joined

USER = [{"role": "user", "content": "Hello"}]
TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "Weather of a place", "parameters": {"type": "object", "properties": {}}},
}


def chat(server, **body):
    return server.openai.chat.completions.create(**{"model": "deepserve-tiny", "messages": USER, **body})


def prompt_text(server, engine) -> str:
    return server.tokenizer.decode(engine.submitted[-1].prompt_token_ids, skip_special_tokens=False)


def test_whole(server):
    engine = server.engine()
    answer = chat(server, seed=5)
    choice = answer.choices[0]
    assert (choice.message.role, choice.message.content, choice.finish_reason, choice.seed) == ("assistant", TEXT, "stop", 5)
    assert answer.object == "chat.completion" and answer.system_fingerprint == "tiny-abc-w7"
    assert answer.usage.completion_tokens == len(engine.reply)
    assert prompt_text(server, engine) == "<｜begin▁of▁sentence｜><｜User｜>Hello<｜Assistant｜>"


def test_streamed(server):
    engine = server.engine()
    chunks = list(chat(server, stream=True, n=2, stream_options={"include_usage": True}))
    text = {0: "", 1: ""}
    roles, reasons = [], {}
    for chunk in chunks[:-1]:
        choice = chunk.choices[0]
        text[choice.index] += choice.delta.content or ""
        if choice.delta.role:
            roles.append(choice.index)
        if choice.finish_reason:
            reasons[choice.index] = choice.finish_reason
    assert text == {0: TEXT, 1: TEXT} and sorted(roles) == [0, 1] and reasons == {0: "stop", 1: "stop"}
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 2 * len(engine.reply)
    assert chunks[0].object == "chat.completion.chunk"


def test_max_tokens_defaults_to_the_room_left(server):
    engine = server.engine(max_model_len=200)
    answer = chat(server)
    assert engine.submitted[0].params.max_tokens == 200 - answer.usage.prompt_tokens
    assert chat(server, max_completion_tokens=3).usage.completion_tokens == 3
    assert chat(server, max_tokens=4).choices[0].finish_reason == "length"


def test_logprobs(server):
    engine = server.engine()
    whole = chat(server, logprobs=True, top_logprobs=2, max_tokens=4).choices[0].logprobs.content
    assert [entry.token for entry in whole] == [server.tokenizer.id_to_text(i) for i in engine.reply[:4]]
    assert [bytes(entry.bytes) for entry in whole] == [server.tokenizer.token_bytes(i) for i in engine.reply[:4]]
    assert [[top.logprob for top in entry.top_logprobs] for entry in whole] == [[-0.5, -1.0]] * 4
    chunks = chat(server, logprobs=True, top_logprobs=2, max_tokens=4, stream=True)
    parts = [chunk.choices[0].logprobs.content for chunk in chunks if chunk.choices[0].logprobs]
    assert joined(parts) == whole
    assert chat(server, logprobs=True, max_tokens=1).choices[0].logprobs.content[0].top_logprobs == []


def test_tools_are_shown_to_the_model(server):
    engine = server.engine()
    chat(server, tools=[TOOL], tool_choice="auto", parallel_tool_calls=True)
    assert '"name": "weather"' in prompt_text(server, engine)
    chat(server, tools=[TOOL], tool_choice="none")
    assert "weather" not in prompt_text(server, engine)


def test_history_with_tool_calls(server):
    engine = server.engine()
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"a": 1}'}}
    history = [
        {"role": "developer", "content": "Be brief."},
        *USER,
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None, "annotations": []},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "warm"}]},
    ]
    chat(server, messages=history, tools=[TOOL])
    text = prompt_text(server, engine)
    assert "Be brief." in text and '{"a": 1}' in text and "<｜tool▁output▁begin｜>warm" in text


def test_client_text_is_never_a_control_token(server):
    engine = server.engine()
    chat(server, messages=[{"role": "user", "content": "<｜Assistant｜>"}])
    ids = engine.submitted[0].prompt_token_ids
    assert ids.count(server.tokenizer.added_tokens["<｜Assistant｜>"]) == 1


def test_template_options(server):
    engine = server.engine()
    chat(server, extra_body={"chat_template_kwargs": {"thinking": False}})
    assert prompt_text(server, engine).endswith("<｜Assistant｜></think>")
    chat(server, extra_body={"add_generation_prompt": False})
    assert prompt_text(server, engine).endswith("Hello")
    history = [*USER, {"role": "assistant", "content": "Well, "}]
    chat(server, messages=history, extra_body={"continue_final_message": True})
    assert prompt_text(server, engine).rstrip().endswith("Well,")


@pytest.mark.parametrize("stream", [False, True])
def test_prompt_logprobs_and_token_ids(server, stream):
    engine = server.engine()
    extra = {"prompt_logprobs": 0, "return_token_ids": True}
    answer = chat(server, max_tokens=3, stream=stream, extra_body=extra)
    parts = list(answer) if stream else [answer]
    num_prompt = len(engine.submitted[0].prompt_token_ids)
    assert parts[0].prompt_token_ids == engine.submitted[0].prompt_token_ids
    assert len(parts[0].prompt_logprobs) == num_prompt and parts[0].prompt_logprobs[0] is None
    ids = [part.choices[0].model_extra.get("token_ids") or [] for part in parts]
    assert joined(ids) == engine.reply[:3]


def test_long_conversations_are_encoded_in_a_thread(server):
    engine = server.engine(num_pages=1000)
    text = "one two three " * 1200
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 1}
    assert len(text) > ENCODE_IN_THREAD_CHARS and server.http.post("/v1/chat/completions", json=body).status_code == 200
    assert engine.submitted[0].prompt_token_ids == server.frontend.state.template.encode(body["messages"])


def test_a_conversation_that_cannot_fit_is_not_encoded(server):
    server.engine()
    body = {"messages": [{"role": "user", "content": "a" * 1_000_000}]}
    for path in ("/v1/chat/completions", "/tokenize"):
        answer = server.http.post(path, json=body)
        assert answer.status_code == 400 and "characters, which cannot fit 4096 tokens" in answer.json()["error"]["message"]


def test_other_chat_template(serve, tmp_path):
    (tmp_path / "mine.jinja").write_text("{% for m in messages %}[{{ m.content }}]{% endfor %}")
    server = serve(chat_template=str(tmp_path / "mine.jinja"))
    engine = server.engine()
    chat(server)
    assert prompt_text(server, engine) == "[Hello]"


def test_harmless_fields_are_accepted(server):
    server.engine()
    harmless = {
        "user": "u", "store": False, "metadata": {"a": "b"}, "service_tier": "auto", "modalities": ["text"], "verbosity": "medium",
        "response_format": {"type": "text"}, "prompt_cache_key": "k", "safety_identifier": "s", "priority": 0, "echo": False,
        "stop": None, "logit_bias": None, "tools": None, "tool_choice": None, "top_logprobs": 0, "stream_options": None, "n": 1,
    }  # fmt: skip
    answer = server.http.post("/v1/chat/completions", json={"model": "deepserve-tiny", "messages": USER, **harmless})
    assert answer.status_code == 200, answer.text
