"""The engine client and the router by themselves, and the routes that only report."""

import asyncio
import logging

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from deepserve import __version__
from deepserve.engine.request import SamplingParams, SequenceOutput
from deepserve.messages import PROTOCOL_VERSION, Register
from deepserve.server.client import EngineClient
from deepserve.server.stats import Histogram
from deepserve.server.stream import OutputStream
from tests.deepserve.server.conftest import REGISTER, FakeEngine

PROMPT = {"prompt": "Hi", "max_tokens": 6}


def test_submit_and_stream(server):
    async def go():
        client = EngineClient()
        engine = FakeEngine(client.address, [5, 6, 7], tokens_per_step=2)
        await client.wait_for_engines(1)
        stream = client.submit([1, 2], SamplingParams(n=2, max_tokens=5, seed=1))
        tokens = {0: [], 1: []}
        async for output in stream:
            tokens[output.index] += output.token_ids
        assert tokens == {0: [5, 6, 7, 5, 6], 1: [5, 6, 7, 5, 6]}
        client.stop()
        await client.wait_for_change()
        assert not client.engines and engine.ended_by == "Stop"
        client.close()

    asyncio.run(go())


def test_piled_up_outputs_of_a_sequence_are_merged():
    async def go():
        stream = OutputStream(lambda requests: None)
        for token in range(1000):
            stream.put(SequenceOutput("a", 0, [token]))
            stream.put(SequenceOutput("a", 1, [-token], finish_reason="length" if token == 999 else None))
        first, second = await stream.take()
        assert first.token_ids == list(range(1000)) and first.finish_reason is None
        assert second.token_ids[-1] == -999 and second.finish_reason == "length"
        assert await stream.take() == []

    asyncio.run(go())


def test_other_protocol_versions_are_refused(server, caplog):
    caplog.set_level(logging.ERROR, "deepserve.server")
    engine = FakeEngine(server.frontend.client.address, [5], protocol_version=99)
    engine.wait_for(lambda: engine.ended_by == "Stop", "stop")
    assert "speaks protocol version 99" in caplog.text
    assert server.http.get("/health").status_code == 503


def test_other_models_are_refused(server, caplog):
    caplog.set_level(logging.ERROR, "deepserve.server")
    server.engine()
    other = FakeEngine(server.frontend.client.address, [5], dp_rank=1, model_fingerprint="other")
    other.wait_for(lambda: other.ended_by == "Stop", "stop")
    assert "its model other is not the tiny-abc" in caplog.text
    assert server.http.get("/health").status_code == 200


def test_junk_on_the_wire_is_ignored(server, caplog):
    caplog.set_level(logging.ERROR, "deepserve.server")
    engine = server.engine()
    future = msgspec.msgpack.encode(["register", PROTOCOL_VERSION + 1, "and", "something", "else"])
    for junk in (b"", b"\xc1", b"\x93" * 3000, msgspec.msgpack.encode({"a": 1}), future):
        engine.send_raw(junk)
    assert server.http.post("/v1/completions", json=PROMPT).status_code == 200
    assert f"speaks protocol version {PROTOCOL_VERSION + 1}" in caplog.text


def test_a_new_engine_replaces_its_predecessor(server):
    old = server.engine(hold_after=1)
    answer = server.in_background(lambda: server.http.post("/v1/completions", json=PROMPT))
    old.wait_for(lambda: old.steps == 1, "one token")
    server.engines.append(FakeEngine(server.frontend.client.address, old.reply))
    assert answer.result(10).status_code == 500 and "replaced" in answer.result(10).text
    assert server.http.post("/v1/completions", json=PROMPT).status_code == 200


def test_outputs_for_unknown_requests_are_ignored(server):
    engine = server.engine()
    engine.send(SequenceOutput("nobody", 0, [5]), SequenceOutput("nobody", 7, [], finish_reason="stop"))
    assert server.http.post("/v1/completions", json=PROMPT).status_code == 200


def test_limits_are_those_of_the_smallest_engine(server):
    server.engine()
    server.engine(dp_rank=1, max_model_len=100, num_pages=1)
    limits = server.frontend.client.limits
    assert (limits.vocab_size, limits.max_model_len, limits.max_seq_tokens) == (4096, 100, 64)
    assert isinstance(REGISTER, Register)


def test_histogram_buckets_are_cumulative():
    histogram = Histogram((1, 2, 5))
    for value in (0.5, 1, 1.5, 100):
        histogram.observe(value)
    histogram.observe(3, times=2)
    assert histogram.buckets() == [("1.0", 2), ("2.0", 3), ("5.0", 5), ("+Inf", 6)]
    assert histogram.total == 109


def samples(server) -> dict[tuple, float]:
    text = server.http.get("/metrics").text
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            names = ("finished_reason", "le", "position", "result", "state")
            extra = next((sample.labels[name] for name in names if name in sample.labels), None)
            key = (sample.name, sample.labels.get("engine"), extra)
            assert key not in found
            found[key] = sample.value
    return found


def test_metrics_add_up(serve):
    server = serve()
    engine = server.engine()
    server.engine(dp_rank=1)
    for _ in range(4):
        server.http.post("/v1/completions", json={**PROMPT, "n": 2})
    server.openai.completions.create(model="deepserve-tiny", prompt="Hi", max_tokens=100, stop=["One"])
    server.wait_until_idle()
    found = samples(server)

    def total(name: str, extra=None) -> float:
        return sum(found[f"vllm:{name}", label, extra] for label in "01")

    num_prompt = len(server.encode("Hi")) + 1
    assert total("prompt_tokens_total") == total("request_prompt_tokens_sum") == 5 * num_prompt
    assert total("generation_tokens_total") == total("request_generation_tokens_sum") >= 4 * 2 * 6
    assert total("request_success_total", "length") == 8 and total("request_success_total", "stop") == 1
    assert total("request_success_total", "abort") == total("request_success_total", "error") == 0
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_generation_tokens"):
        assert total(f"{name}_count") == total(f"{name}_bucket", "+Inf") == 9
    assert total("inter_token_latency_seconds_count") == total("generation_tokens_total") - 9
    assert total("num_preemptions_total") == 6 and found["vllm:num_requests_running", "0", None] >= 0
    assert 0 <= found["vllm:kv_cache_usage_perc", "1", None] <= 1
    assert total("spec_decode_num_drafts_total") == 20 and total("spec_decode_num_draft_tokens_total") == 40
    assert total("spec_decode_num_accepted_tokens_total") == 26
    assert [total("spec_decode_num_accepted_tokens_per_pos_total", place) for place in "01"] == [18, 8]
    assert found["vllm:spec_decode_mean_acceptance_length", "0", None] == 2.3
    pages = [found["deepserve:kv_cache_pages", "0", state] for state in ("free", "cached", "held", "in_transfer", "quarantined")]
    assert sum(pages) == 64 and pages[1:] == [2, 0, 3, 4]
    assert engine.submitted


def test_models(server):
    assert server.http.get("/v1/models").json()["data"][0]["max_model_len"] is None
    server.engine()
    (model,) = server.openai.models.list().data
    assert (model.id, model.object, model.owned_by, model.max_model_len) == ("deepserve-tiny", "model", "deepserve", 4096)
    assert server.openai.models.retrieve("deepserve-tiny").id == "deepserve-tiny"


def test_served_model_names(serve):
    server = serve(served_model_name=("org/first", "second"))
    server.engine()
    assert [model.id for model in server.openai.models.list().data] == ["org/first", "second"]
    assert server.http.get("/v1/models/org/first").json()["id"] == "org/first"
    assert server.http.post("/v1/completions", json=PROMPT).json()["model"] == "org/first"
    assert server.http.post("/v1/completions", json={**PROMPT, "model": "second"}).json()["model"] == "second"


def test_tokenize_and_back(server):
    server.engine()
    text = "Grüße 😀<｜User｜>"
    tokens = server.http.post("/tokenize", json={"prompt": text}).json()
    assert tokens["tokens"] == server.tokenizer.encode(text) and tokens["count"] == len(tokens["tokens"])
    assert tokens["max_model_len"] == 4096 and tokens["token_strs"] is None
    plain = server.http.post("/tokenize", json={"prompt": text, "add_special_tokens": False, "return_token_strs": True}).json()
    assert plain["tokens"] == tokens["tokens"][1:] and plain["token_strs"][-1] == "<｜User｜>"
    assert server.http.post("/detokenize", json={"tokens": plain["tokens"]}).json() == {"prompt": text}
    chat = server.http.post("/tokenize", json={"messages": [{"role": "user", "content": "Hi"}]}).json()["tokens"]
    assert server.tokenizer.decode(chat, skip_special_tokens=False) == "<｜begin▁of▁sentence｜><｜User｜>Hi<｜Assistant｜>"
    for path, body in (("/tokenize", {}), ("/tokenize", {"prompt": "a", "messages": []}), ("/detokenize", {"tokens": [5000]})):
        assert server.http.post(path, json=body).status_code == 400


def test_version_and_documents(server):
    assert server.http.get("/version").json() == {"version": __version__}
    paths = server.http.get("/openapi.json").json()["paths"]
    assert {"/v1/chat/completions", "/v1/completions", "/health", "/metrics"} <= set(paths)
