"""From what a user said to a checked config: every refusal names the value."""

import dataclasses
from pathlib import Path

import msgspec
import pytest

from deepserve.config import EngineArgs, EngineConfig, SpeculativeConfig
from deepserve.model.config import ModelConfig
from eplb.config import EPLBConfig

MODEL = ModelConfig.from_folder(Path(__file__).parents[2] / "deepserve" / "models" / "deepserve-tiny")


def resolve(**args) -> EngineConfig:
    return EngineConfig.resolve(EngineArgs(**args), "here", MODEL)


def test_defaults_resolve():
    config = resolve()
    assert (config.model_path, config.max_model_len, config.page_size) == ("here", 4096, 64)
    assert (config.parallel.num_ranks, config.eplb.num_redundant_experts) == (1, 0)
    assert config.model is MODEL


@pytest.mark.parametrize(
    ("args", "wanted"),
    [
        ({}, None),
        ({"num_speculative_tokens": 0}, None),
        ({"speculative_config": SpeculativeConfig(num_speculative_tokens=0)}, None),
        ({"num_speculative_tokens": 2}, SpeculativeConfig(num_speculative_tokens=2)),
        ({"speculative_config": SpeculativeConfig(method="deepseek_mtp", adaptive=False), "num_speculative_tokens": 1}, (1, False)),
    ],
)
def test_ways_to_ask_for_drafts(args, wanted):
    found = resolve(**args).speculative
    assert found == wanted or (found.num_speculative_tokens, found.adaptive) == wanted


def test_drafts_need_an_mtp_module():
    bare = dataclasses.replace(MODEL, mtp=dataclasses.replace(MODEL.mtp, num_layers=0))
    with pytest.raises(ValueError, match="needs a model with an MTP module, this one has none"):
        EngineConfig.resolve(EngineArgs(num_speculative_tokens=1), "here", bare)


def test_redundant_experts_in_two_places():
    in_order = EPLBConfig(num_redundant_experts=4, window_size=7)
    assert resolve(num_redundant_experts=4).eplb == EPLBConfig(num_redundant_experts=4)
    assert resolve(eplb_config=in_order).eplb == resolve(eplb_config=in_order, num_redundant_experts=4).eplb == in_order
    assert resolve(eplb_config=EPLBConfig(window_size=7), num_redundant_experts=4).eplb == in_order


REFUSED = {
    "redundant experts twice": (
        {"eplb_config": EPLBConfig(num_redundant_experts=4), "num_redundant_experts": 3},
        "num_redundant_experts is 3, but eplb_config says 4",
    ),
    "overlap on one rank": ({"enable_dbo": True}, "enable_dbo overlaps what travels between ranks, and this instance has one rank"),
    "dtype": ({"dtype": "float16"}, "dtype must be one of auto, float32, bfloat16, got 'float16'"),
    "load_format": ({"load_format": "gguf"}, "load_format must be one of auto, dummy, got 'gguf'"),
    "no sequences": ({"max_num_seqs": 0}, "max_num_seqs must be at least 1, got 0"),
    "no tokens": ({"max_num_batched_tokens": -1}, "max_num_batched_tokens must be at least 1, got -1"),
    "no dispatch": ({"max_dispatch_tokens_per_rank": 0}, "max_dispatch_tokens_per_rank must be at least 1, got 0"),
    "no pages": ({"num_pages": 0}, "num_pages must be at least 1, got 0"),
    "no threads": ({"num_threads": 0}, "num_threads must be at least 1, got 0"),
    "no memory": ({"kv_cache_memory_bytes": 0}, "kv_cache_memory_bytes must be at least 1, got 0"),
    "no length": ({"max_model_len": 0}, "max_model_len must be at least 1, got 0"),
    "too long": ({"max_model_len": 4097}, "max_model_len 4097 exceeds the 4096 positions of the model"),
    "threshold": ({"long_prefill_token_threshold": -1}, "long_prefill_token_threshold must be at least 0, got -1"),
    "utilization 0": ({"memory_utilization": 0.0}, "memory_utilization must be above 0 and at most 1, got 0.0"),
    "utilization above 1": ({"memory_utilization": 1.1}, "got 1.1"),
    "utilization nan": ({"memory_utilization": float("nan")}, "got nan"),
    "whole prompts": (
        {"enable_chunked_prefill": False, "max_num_batched_tokens": 4095},
        "max_num_batched_tokens 4095 is below max_model_len 4096",
    ),
    # It would cut prompts that may not be cut: they would wait for ever.
    "whole prompts, cut": (
        {"enable_chunked_prefill": False, "max_num_batched_tokens": 4096, "long_prefill_token_threshold": 512},
        "long_prefill_token_threshold 512 needs chunked prefill",
    ),
    "other method": ({"speculative_config": SpeculativeConfig(method="ngram")}, "one of mtp, deepseek_mtp, got 'ngram'"),
    "too many drafts": ({"num_speculative_tokens": 17}, "num_speculative_tokens must be from 0 to 16, got 17"),
    "fewer than no drafts": ({"num_speculative_tokens": -1}, "num_speculative_tokens must be from 0 to 16, got -1"),
    "two numbers of drafts": (
        {"speculative_config": SpeculativeConfig(num_speculative_tokens=2), "num_speculative_tokens": 1},
        "num_speculative_tokens is 1, but speculative_config says 2",
    ),
    "no replicas": ({"data_parallel_size": 0}, "data_parallel_size must be at least 1, got 0"),
    "no ranks": ({"tensor_parallel_size": -2}, "tensor_parallel_size must be at least 1, got -2"),
    "heads": ({"tensor_parallel_size": 3}, "tensor_parallel_size 3 does not divide the model's 8 heads"),
    "redundant experts": ({"num_redundant_experts": -1}, "num_redundant_experts must be at least 0, got -1"),
    "timeout": ({"step_timeout_s": 0.0}, "step_timeout_s must be a number above 0, got 0.0"),
    "timeout nan": ({"step_timeout_s": float("nan")}, "got nan"),
    "type of a number": ({"max_num_seqs": "8"}, "max_num_seqs"),
    "a bool for a number": ({"max_num_batched_tokens": True}, "max_num_batched_tokens"),
    "a number for a bool": ({"enable_prefix_caching": 1}, "enable_prefix_caching"),
    "a float for a number": ({"num_pages": 4.5}, "num_pages"),
    "None for a number": ({"max_num_seqs": None}, "max_num_seqs"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name):
    args, text = REFUSED[name]
    with pytest.raises(ValueError) as caught:
        resolve(**args)
    assert text in str(caught.value)


TAKEN = [
    {"dtype": "bfloat16", "load_format": "dummy"},
    {"max_model_len": 4096, "max_num_seqs": 1, "max_num_batched_tokens": 1, "max_dispatch_tokens_per_rank": 1, "num_pages": 1},
    {"enable_chunked_prefill": False, "max_num_batched_tokens": 4096},
    {"enable_chunked_prefill": False, "max_num_batched_tokens": 512, "max_model_len": 512},
    {"memory_utilization": 1},
    {"tensor_parallel_size": 4, "data_parallel_size": 2},
    {"num_redundant_experts": 8, "long_prefill_token_threshold": 1},
]


@pytest.mark.parametrize("args", TAKEN, ids=lambda args: " ".join(args))
def test_edges_are_taken(args):
    assert resolve(**args).args == EngineArgs(**args)


def test_limits():
    limits = resolve(max_model_len=1000).limits(num_pages=7)
    assert (limits.vocab_size, limits.max_model_len, limits.max_seq_tokens) == (4096, 1000, 7 * 64)


def test_arguments_travel():
    args = EngineArgs(model="m", num_pages=5, batch_invariant=True)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(args), type=EngineArgs) == args
