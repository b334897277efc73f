"""What is refused: always in OpenAI's shape, with the field and the value, and before an engine sees anything."""

import json
import math
import socket

import pytest

from tests.deepserve.server.conftest import Served

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USER = {"messages": [{"role": "user", "content": "Hi"}]}
PROMPT = {"prompt": "Hi"}


def check(answer, status: int, *words: str) -> dict:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    for word in words:
        assert word in error["message"], error["message"]
    return error


BOTH = [
    ({"temperature": -0.1}, "temperature", "-0.1"),
    ({"temperature": 1e30}, "temperature", "1e+30"),
    ({"temperature": "hot"}, "temperature", "str"),
    ({"temperature": True}, "temperature", "bool"),
    ({"top_p": 0}, "top_p", "0"),
    ({"top_p": 1.5}, "top_p", "1.5"),
    ({"top_k": -2}, "top_k", "-2"),
    ({"top_k": 1.5}, "top_k", "float"),
    ({"min_p": 2}, "min_p", "2"),
    ({"presence_penalty": 3}, "presence_penalty", "3"),
    ({"frequency_penalty": -3}, "frequency_penalty", "-3"),
    ({"repetition_penalty": 0}, "repetition_penalty", "0"),
    ({"n": 0}, "n must", "0"),
    ({"n": 100000}, "n must", "100000"),
    ({"n": 2, "best_of": 3}, "best_of", "3"),
    ({"seed": 1 << 70}, "seed", str(1 << 70)),
    ({"seed": 1.5}, "seed", "float"),
    ({"max_tokens": -1}, "max_tokens", "-1"),
    ({"max_tokens": 10**30}, "max_tokens", str(10**30)),
    ({"max_tokens": 0}, "max_tokens 0"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens", "5"),
    ({"min_tokens": 10**6, "max_tokens": 10**7}, "min_tokens", "1000000"),
    ({"stop": ["a", ""]}, "stop", "''"),
    ({"stop": ["a", 1]}, "stop", "int"),
    ({"stop": ["a"] * 1000}, "stop", "1000"),
    ({"stop": "x" * 10_000}, "stop", "10000"),
    ({"stop_token_ids": [4096]}, "stop_token_ids", "4096"),
    ({"stop_token_ids": [-1]}, "stop_token_ids", "-1"),
    ({"stop_token_ids": [0] * 5000}, "stop_token_ids", "5000"),
    ({"logit_bias": {"abc": 1}}, "logit_bias", "abc"),
    ({"logit_bias": {"-1": 1}}, "logit_bias", "-1"),
    ({"logit_bias": {"4096": 1}}, "logit_bias", "4096"),
    ({"logit_bias": {"9" * 30: 1}}, "logit_bias", "999"),
    ({"logit_bias": {"1": 101}}, "logit_bias[1]", "101"),
    ({"logit_bias": {"1": "x"}}, "logit_bias", "str"),
    ({"logit_bias": {str(i): 1 for i in range(5000)}}, "logit_bias", "5000"),
    ({"prompt_logprobs": 1000}, "prompt_logprobs", "1000"),
    ({"response_format": {"type": "json_object"}}, "response_format", "json_object"),
    ({"structured_outputs": {"regex": "a"}}, "structured_outputs", "regex"),
    ({"guided_json": {}}, "guided_json"),
    ({"service_tier": "priority"}, "service_tier", "priority"),
    ({"store": True}, "store", "True"),
    ({"priority": 3}, "priority", "3"),
    ({"cache_salt": "x" * 1000}, "cache_salt", "1000"),
    ({"stream": "yes"}, "stream", "str"),
    ({"stream_options": {"usage": True}}, "stream_options.usage"),
    ({"frobnicate": 1}, "frobnicate"),
    ({"model": 5}, "model", "int"),
]  # fmt: skip
ONLY_CHAT = [
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "user"}]}, "content", "None"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "wizard"),
    ({"messages": [{"role": "user", "content": "x", "mood": "good"}]}, "mood"),
    ({"messages": [{"role": "user", "content": 5}]}, "content", "int"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "image_url"),
    ({"messages": "Hi"}, "messages", "str"),
    ({"messages": [{"role": "user", "content": "word " * 10_000}]}, "4096"),
    ({"tool_choice": "required", "tools": [{"function": {"name": "f"}}]}, "tool_choice", "required"),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice", "'f'"),
    ({"tool_choice": "auto"}, "tool_choice", "tools"),
    ({"tools": [{"type": "retrieval", "function": {"name": "f"}}]}, "retrieval"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"audio": {"voice": "x"}}, "audio"),
    ({"modalities": ["text", "audio"]}, "modalities", "audio"),
    ({"reasoning_effort": "high"}, "reasoning_effort", "high"),
    ({"top_logprobs": 2}, "top_logprobs", "2"),
    ({"logprobs": True, "top_logprobs": 1000}, "top_logprobs", "1000"),
    ({"logprobs": 2}, "logprobs", "int"),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens", "4"),
    ({"echo": True}, "True"),
    ({"chat_template_kwargs": {"messages": []}}, "messages"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
]  # fmt: skip
ONLY_COMPLETIONS = [
    ({"prompt": None}, "prompt"),
    ({"prompt": []}, "prompt", "empty"),
    ({"prompt": [[]]}, "prompt", "empty"),
    ({"prompt": ["a", 1]}, "prompt", "mixes"),
    ({"prompt": [[1, "a"]]}, "prompt", "str"),
    ({"prompt": [1.5]}, "prompt", "float"),
    ({"prompt": [4096]}, "4096"),
    ({"prompt": [[5], [-1]]}, "-1"),
    ({"prompt": [1 << 80]}, str(1 << 80)),
    ({"prompt": [5] * 4097}, "4097"),
    ({"prompt": ["a"] * 3000}, "3000"),
    ({"prompt": ["a"] * 100, "n": 100}, "10000"),
    ({"prompt": "word " * 10_000}, "4096"),
    ({"prompt": "x" * 3_000_000}, "3000000"),
    ({"logprobs": 1000}, "logprobs", "1000"),
    ({"logprobs": True}, "logprobs", "bool"),
    ({"suffix": "end"}, "suffix", "end"),
    ({"messages": []}, "messages"),
]  # fmt: skip
CASES = [(path, base, *case) for path, base in ((CHAT, USER), (COMPLETIONS, PROMPT)) for case in BOTH]
CASES += [(CHAT, USER, *case) for case in ONLY_CHAT] + [(COMPLETIONS, PROMPT, *case) for case in ONLY_COMPLETIONS]


@pytest.fixture(scope="module")
def shared(tokenizer):
    """One server for all cases, for none of them changes it."""
    server = Served(tokenizer)
    server.engine()
    yield server
    server.close()


@pytest.mark.parametrize(("path", "base", "fields", "words"), [(case[0], case[1], case[2], case[3:]) for case in CASES])
def test_bad_values(shared, path, base, fields, words):
    num_submitted = len(shared.engines[0].submitted)
    error = check(shared.http.post(path, json={**base, **fields}), 400, *words)
    assert error["type"] == "invalid_request_error"
    assert len(shared.engines[0].submitted) == num_submitted


@pytest.mark.parametrize(
    ("body", "word"),
    [
        (b"", "JSON"),
        (b"{", "JSON"),
        (b"[]", "object"),
        (b"null", "object"),
        (b'{"prompt": "Hi"} x', "JSON"),
        (b'{"prompt": "\xff\xfe"}', "UTF-8"),
        (b'{"prompt": "\\ud800"}', "JSON"),
        (b'{"prompt": "Hi", "temperature": NaN}', "JSON"),
        (b'{"prompt": "Hi", "temperature": Infinity}', "JSON"),
        (b'{"prompt": "Hi", "temperature": 1e999}', "temperature"),
        (b'{"prompt": "Hi", "metadata": ' + b'{"a":' * 100_000, "nested"),
        (b"\x00\x01\x02", "JSON"),
    ],
)
def test_bad_json(shared, body, word):
    for path in (COMPLETIONS, CHAT, "/tokenize", "/detokenize"):
        if path == COMPLETIONS or b"prompt" not in body:
            check(shared.http.post(path, content=body), 400, word)


def test_nan_is_refused_by_name_where_json_lets_it_through(shared):
    """Python's own encoder writes NaN, which is no JSON."""
    body = json.dumps({"prompt": "Hi", "top_p": math.nan}).encode()
    check(shared.http.post(COMPLETIONS, content=body), 400)


def test_param_names_the_field(shared):
    for fields, param in (
        ({"temperature": -1}, "temperature"),
        ({"max_tokens": "x"}, "max_tokens"),
        ({"frobnicate": 1}, "frobnicate"),
        ({"stop_token_ids": [9999]}, "stop_token_ids"),
    ):
        assert check(shared.http.post(COMPLETIONS, json={**PROMPT, **fields}), 400)["param"] == param
    assert check(shared.http.post(COMPLETIONS, json={}), 400)["param"] == "prompt"
    assert check(shared.http.post(CHAT, json={"messages": [{"content": "x"}]}), 400)["param"] == "messages[0].role"


@pytest.mark.parametrize("num_words", [5000, 1_000_000])
def test_a_prompt_that_does_not_fit_has_openais_code(shared, num_words):
    for path, body in (
        (COMPLETIONS, {"prompt": "word " * num_words}),
        (CHAT, {"messages": [{"role": "user", "content": "word " * num_words}]}),
    ):
        assert check(shared.http.post(path, json=body), 400)["code"] == "context_length_exceeded"


def test_unknown_model(shared):
    for path, base in ((CHAT, USER), (COMPLETIONS, PROMPT)):
        error = check(shared.http.post(path, json={**base, "model": "gpt-9"}), 404, "gpt-9")
        assert error["code"] == "model_not_found"
    check(shared.http.get("/v1/models/gpt-9"), 404, "gpt-9")


def test_unknown_routes_and_methods(shared):
    check(shared.http.get("/v1/nothing"), 404, "/v1/nothing")
    answer = shared.http.get(COMPLETIONS)
    check(answer, 405, "GET")
    assert answer.headers["allow"] == "POST"


def test_body_too_large_by_its_length(serve):
    server = serve()
    check(server.http.post(COMPLETIONS, content=b"x" * (50 << 20)), 413, str(16 << 20))


def test_body_too_large_without_a_length(serve):
    """The refusal comes while the client is still sending: nobody waits for the end of the body."""
    server = serve(max_body_bytes=1 << 16)
    with socket.create_connection(("127.0.0.1", server.frontend.port), timeout=10) as raw:
        raw.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
        for _ in range(5):
            raw.sendall(b"4000\r\n" + b" " * 0x4000 + b"\r\n")
        assert raw.recv(1 << 16).startswith(b"HTTP/1.1 413")
    server.engine()
    assert server.http.post(COMPLETIONS, json=PROMPT).status_code == 200


def test_api_key(serve):
    server = serve(api_key=("secret", "other"))
    server.engine()
    assert server.http.post(COMPLETIONS, json=PROMPT).status_code == 200
    assert server.http.post(COMPLETIONS, json=PROMPT, headers={"authorization": "bearer other"}).status_code == 200
    for value in ("Bearer wrong", "secret", "Basic secret", "Bearer", ""):
        answer = server.http.post(COMPLETIONS, json=PROMPT, headers={"authorization": value})
        assert check(answer, 401)["code"] == "invalid_api_key"
        for path in ("/v1/models", "/version", "/docs", "/openapi.json", "/nothing"):
            assert server.http.get(path, headers={"authorization": value}).status_code == 401
        for path in ("/health", "/ready", "/metrics"):
            assert server.http.get(path, headers={"authorization": value}).status_code == 200


def test_admin_routes(serve):
    """Closed without a key of their own; with one, the others' keys do not open them."""
    closed = serve(api_key=("secret",))
    assert check(closed.http.post("/scale", json={"dp": 1}), 403)["code"] == "admin_closed"
    server = serve(api_key=("secret",), admin_api_key=("root",))
    assert check(server.http.post("/scale", json={"dp": 1}, headers={"authorization": "Bearer secret"}), 401)
    answer = server.http.post("/scale", json={"dp": 1}, headers={"authorization": "Bearer root"})
    assert "instance must be one that was started with on_rank_death" in check(answer, 400)["message"]
    with pytest.raises(ValueError, match="admin_api_key is empty"):
        serve(admin_api_key=("",))


def test_too_many_requests(serve):
    server = serve(max_concurrent_requests=2)
    engine = server.engine(hold_after=1)
    answers = [server.in_background(lambda: server.http.post(COMPLETIONS, json=PROMPT)) for _ in range(2)]
    engine.wait_for(lambda: len(engine.submitted) == 2, "two requests")
    answer = server.http.post(COMPLETIONS, json=PROMPT)
    check(answer, 429)
    assert answer.headers["retry-after"]
    assert server.http.get("/health").status_code == 200
    engine.release()
    assert [each.result(10).status_code for each in answers] == [200, 200]
    assert server.http.post(COMPLETIONS, json=PROMPT).status_code == 200


def test_without_an_engine(server):
    for path, base in ((CHAT, USER), (COMPLETIONS, PROMPT)):
        check(server.http.post(path, json=base), 503)
