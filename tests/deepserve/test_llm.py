"""Offline use: `LLM`, and `deepserve generate`."""

import json
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from deepserve import LLM, SamplingParams
from deepserve.engine.request import Limits
from deepserve.llm import _Job
from deepserve.messages import SequenceOutput
from tests.deepserve.serving import WAIT_S, command

QUESTIONS = [[{"role": "user", "content": f"What is {a} + {b}?"}] for a, b in ((12, 30), (7, 5), (200, 41))]
GREEDY = SamplingParams(temperature=0, max_tokens=32)


@pytest.fixture(scope="module")
def llm():
    with LLM(dtype="float32", max_model_len=512) as llm:
        yield llm


def test_chat_in_input_order(llm: LLM):
    outputs = llm.chat(QUESTIONS, GREEDY, use_tqdm=False)
    assert [output.outputs[0].text for output in outputs] == ["12 + 30 = 42.", "7 + 5 = 12.", "200 + 41 = 241."]
    first = outputs[0]
    assert first.finished
    assert first.outputs[0].finish_reason == "stop"
    assert first.outputs[0].token_ids[-1] == 1  # the end token is a token, and no text
    assert first.prompt_token_ids[0] == 0


def test_text_and_ids_are_the_same_prompt(llm: LLM):
    ids = llm.tokenizer.encode("In the beginning God created")
    by_text, by_ids = llm.generate(["In the beginning God created", {"prompt_token_ids": ids}], GREEDY, use_tqdm=False)
    assert by_text.prompt_token_ids == by_ids.prompt_token_ids == ids
    assert by_text.outputs[0].token_ids == by_ids.outputs[0].token_ids
    (by_list,) = llm.generate([ids], GREEDY, use_tqdm=False)
    assert by_list.outputs[0].token_ids == by_ids.outputs[0].token_ids
    assert by_text.prompt == "In the beginning God created"
    assert by_ids.prompt is None


def test_params_for_each_prompt(llm: LLM):
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (1, 5, 9)]
    outputs = llm.generate(["a", "b", "c"], params, use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 5, 9]
    assert {output.outputs[0].finish_reason for output in outputs} == {"length"}


def test_logprobs_have_vllm_shape(llm: LLM):
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=3, prompt_logprobs=2)
    (output,) = llm.chat(QUESTIONS[0], params, use_tqdm=False)
    sequence = output.outputs[0]
    assert len(sequence.logprobs) == len(sequence.token_ids)
    for token, at in zip(sequence.token_ids, sequence.logprobs, strict=True):
        assert at[token].rank == 1
        assert sorted(entry.rank for entry in at.values()) == [1, 2, 3]
        assert at[token].decoded_token == llm.tokenizer.id_to_text(token)
    assert sequence.cumulative_logprob == pytest.approx(
        sum(at[t].logprob for t, at in zip(sequence.token_ids, sequence.logprobs, strict=True))
    )
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
    assert all(token in at for token, at in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True))


def test_n_sequences_and_seed(llm: LLM):
    params = SamplingParams(n=4, temperature=2.0, seed=3, max_tokens=12)
    first, second = (llm.generate("Once", params, use_tqdm=False)[0] for _ in range(2))
    assert [o.index for o in first.outputs] == [0, 1, 2, 3]
    assert [o.token_ids for o in first.outputs] == [o.token_ids for o in second.outputs]
    assert len({tuple(o.token_ids) for o in first.outputs}) == 4


def test_a_drawn_seed_is_reported_and_repeats(llm: LLM):
    params = SamplingParams(temperature=2.0, max_tokens=12)
    (first,) = llm.generate("Once", params, use_tqdm=False)
    (again,) = llm.generate("Once", SamplingParams(temperature=2.0, max_tokens=12, seed=first.seed), use_tqdm=False)
    assert again.outputs[0].token_ids == first.outputs[0].token_ids
    (other,) = llm.generate("Once", params, use_tqdm=False)
    assert other.seed != first.seed


@pytest.mark.parametrize("include", [False, True])
def test_stop_string(llm: LLM, include: bool):
    params = SamplingParams(temperature=0, max_tokens=64, stop=["5, 6"], include_stop_str_in_output=include)
    (output,) = llm.chat([{"role": "user", "content": "Count from 1 to 20."}], params, use_tqdm=False)
    sequence = output.outputs[0]
    assert sequence.text == "1, 2, 3, 4, " + ("5, 6" if include else "")
    assert (sequence.finish_reason, sequence.stop_reason) == ("stop", "5, 6")
    assert llm.tokenizer.decode(sequence.token_ids) == "1, 2, 3, 4, 5, 6"
    llm.engine.scheduler.check()
    assert llm.engine.pages.num_held == 0


def test_stop_token_and_end_of_sequence_tell_apart(llm: LLM):
    comma = llm.tokenizer.encode(",", add_special_tokens=False)[0]
    params = SamplingParams(temperature=0, max_tokens=64, stop_token_ids=[comma])
    (stopped,) = llm.chat([{"role": "user", "content": "Count from 1 to 20."}], params, use_tqdm=False)
    assert (stopped.outputs[0].finish_reason, stopped.outputs[0].stop_reason) == ("stop", comma)
    assert stopped.outputs[0].text == "1"
    (ended,) = llm.chat(QUESTIONS[0], params, use_tqdm=False)
    assert (ended.outputs[0].finish_reason, ended.outputs[0].stop_reason) == ("stop", None)


def test_several_tokens_at_once_stop_inside():
    """A step may bring a run of tokens; what follows the stop string is dropped, from tokens and text."""
    with LLM(max_model_len=64, dtype="float32") as llm:
        ids = llm.tokenizer.encode("1, 2, 3, 4", add_special_tokens=False)
        params = SamplingParams(max_tokens=32, stop="2, 3", seed=0)
        job = _Job("0", None, [5], params, llm.tokenizer)
        job.take(SequenceOutput("0", 0, ids))
    assert job.output.outputs[0].text == "1, "
    assert llm.tokenizer.decode(job.output.outputs[0].token_ids) == "1, 2, 3"
    assert job.output.finished


def test_long_batch_outgrows_the_rows(llm: LLM):
    """More prompts than max_num_seqs."""
    outputs = llm.generate([{"prompt_token_ids": [5 + i]} for i in range(300)], SamplingParams(temperature=0, max_tokens=2), use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == [[5 + i] for i in range(300)]


@pytest.mark.parametrize(
    ("prompts", "params", "sentence"),
    [
        ([{"prompt_token_ids": [4096]}], GREEDY, "prompt 0: the prompt holds token id 4096"),
        (["fine", {"prompt_token_ids": []}], GREEDY, "prompt 1: the prompt is empty"),
        ([{"prompt_token_ids": [5] * 600}], GREEDY, "600 tokens"),
        ([{"ids": [5]}], GREEDY, "prompt 0: must be text or"),
        ([7], GREEDY, "prompt 0: must be text or"),
        (["a", "b"], [GREEDY], "2 prompts came with 1 sampling params"),
    ],
)
def test_refusals_start_nothing(llm: LLM, prompts, params, sentence: str):
    with pytest.raises(ValueError, match=sentence.replace("(", r"\(")):
        llm.generate(prompts, params)
    assert not llm.engine.has_work


def test_failed_step_leaves_nothing_behind(llm: LLM, monkeypatch: pytest.MonkeyPatch):
    def broken(*_):
        raise RuntimeError("device lost")

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.runner, "launch", broken)
        with pytest.raises(RuntimeError, match="device lost"):
            llm.generate("a", GREEDY, use_tqdm=False)
    llm.engine.scheduler.check()
    assert llm.engine.pages.num_held == 0
    assert llm.chat(QUESTIONS[0], GREEDY, use_tqdm=False)[0].outputs[0].text == "12 + 30 = 42."


def test_threads_share_one_object(llm: LLM):
    alone = llm.chat(QUESTIONS, GREEDY, use_tqdm=False)
    with ThreadPoolExecutor(4) as pool:
        answers = pool.map(lambda _: llm.chat(QUESTIONS, GREEDY, use_tqdm=False), range(8))
        texts = [[output.outputs[0].text for output in outputs] for outputs in answers]
    assert texts == [[output.outputs[0].text for output in alone]] * 8
    llm.engine.scheduler.check()


@pytest.mark.parametrize(
    ("prompts", "params", "sentence"),
    [
        (None, None, "prompts must be text"),
        ({"prompt_token_ids": 5}, None, "prompt_token_ids must be a list of token ids, got 5"),
        ("a", {"max_tokens": 1}, "sampling params must be SamplingParams or a list of them, got {'max_tokens': 1}"),
        (["a"], [None], "sampling params must be SamplingParams or a list of them, got None"),
    ],
)
def test_arguments_of_a_wrong_type(llm: LLM, prompts, params, sentence: str):
    with pytest.raises(ValueError, match=re.escape(sentence)):
        llm.generate(prompts, params, use_tqdm=False)


def test_without_tokenizer():
    with LLM(skip_tokenizer_init=True, max_model_len=128) as llm:
        (output,) = llm.generate({"prompt_token_ids": [0, 4084, 580]}, GREEDY, use_tqdm=False)
        assert output.outputs[0].text == ""
        assert output.outputs[0].token_ids
        for prompt, params in (("text", GREEDY), ({"prompt_token_ids": [5]}, SamplingParams(stop="x"))):
            with pytest.raises(ValueError, match="skip_tokenizer_init"):
                llm.generate(prompt, params)
        with pytest.raises(ValueError, match="skip_tokenizer_init"):
            llm.chat(QUESTIONS[0])


@pytest.mark.parametrize(
    ("options", "error", "sentence"),
    [
        ({"tensor_parallel_size": 3}, ValueError, "tensor_parallel_size 3"),
        ({"max_model_len": "long"}, ValueError, "max_model_len"),
        ({"max_modellen": 5}, TypeError, "max_modellen"),
        ({"model": "/no/such/folder"}, ValueError, "/no/such/folder"),
        ({"device": "abacus"}, ValueError, "abacus"),
        ({"kv_cache_memory_bytes": 1000}, ValueError, "number of pages"),
    ],
)
def test_refusals_at_start(options: dict, error: type, sentence: str):
    with pytest.raises(error, match=sentence):
        LLM(**options)


def test_shut_down_is_final():
    llm = LLM(max_model_len=64)
    llm.shutdown()
    with pytest.raises(RuntimeError, match="shut down"):
        llm.generate("a")


def test_two_engines_in_one_process(llm: LLM):
    """There is no ambient state: another model beside the first changes nothing."""
    before = llm.chat(QUESTIONS, GREEDY, use_tqdm=False)
    with LLM(load_format="dummy", max_model_len=64, seed=1) as other:
        other.generate("a", SamplingParams(max_tokens=4), use_tqdm=False)
        after = llm.chat(QUESTIONS, GREEDY, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in before] == [o.outputs[0].token_ids for o in after]


def test_limits_come_from_pages(llm: LLM):
    assert llm.engine.limits == Limits(vocab_size=4096, max_model_len=512, max_seq_tokens=llm.engine.pages.num_pages * 64)


def test_generate_command():
    line = [sys.executable, "-m", "deepserve", "generate", "-p", "What is 12+30?", "--file", "-", "--json"]
    ended = subprocess.run(line, capture_output=True, text=True, timeout=WAIT_S, input="What is 3 + 4?\u2028\n\n")
    assert ended.returncode == 0, ended.stderr
    answers = [json.loads(line) for line in ended.stdout.strip().split("\n")]
    assert answers[0]["text"] == "12 + 30 = 42." and len(answers) == 2
    assert answers[1]["prompt"] == "What is 3 + 4?\u2028"  # one prompt a line, not one for each kind of separator


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "no prompt"),
        (["--file", "/no/such"], "/no/such"),
        (["-p", "a", "--temperature", "-1"], "temperature"),
        (["-p", "a", "--top-p", "0"], "top_p"),
    ],
)
def test_generate_refusals(arguments: list[str], sentence: str):
    ended = command("generate", *arguments)
    assert ended.exit_code == 1
    assert sentence in ended.stderr
