"""Record which experts the shipped model really uses, task by task, for the programs that compare expert placements.

    python bench/eplb_record.py [--requests 60] [--out bench/traces/tiny_routing.npz]

Prompts come from the generators that the model was trained with (models/deepserve-tiny/train/data.py), grouped in topics; prose is
paragraphs of this repository's pages. Each prompt is answered greedily; then prompt and answer run once more, alone, and the experts
chosen at each position are counted: the prompt's are prefill, the answer's decode. The file holds, for each request, its topic and
`[moe layers, experts]` counts of both phases; `bench/eplb_workload.py` reads it.
"""

import argparse
import importlib.util
import random
import re
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import torch

from deepserve import LLM, SamplingParams

ROOT = Path(__file__).parents[1]
TOPICS = {
    "arithmetic": ("add", "sub", "mul", "wordproblem", "chain"),
    "ordering": ("compare", "sort", "minmax"),
    "spelling": ("countletter", "length", "reverse", "spell", "case"),
    "lists": ("reversewords", "repeat", "count", "lists"),
    "facts": ("capital", "talk", "persona", "memory"),
    "json": ("json", "jsonlist", "jsonmath"),
    "tools": ("tool",),
    "writing": ("story", "poem", "email", "bullets"),
    "chinese": ("chinese",),
    "code": ("code",),
}
MAX_TOKENS = 96


def load_tasks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("training_data", ROOT / "models/deepserve-tiny/train/data.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


def paragraphs() -> list[str]:
    text = "\n\n".join(path.read_text("utf-8") for path in sorted((ROOT / "docs").glob("*.md")))
    found = [re.sub(r"\s+", " ", part).strip() for part in text.split("\n\n")]
    return [part for part in found if 200 <= len(part) <= 1500 and "|" not in part]


def make_prompts(requests: int) -> list[tuple[str, str]]:
    """(topic, prompt text), `requests` of each topic."""
    data, rng = load_tasks(), random.Random(0)
    prose = paragraphs()
    words = sorted({word for part in prose for word in re.findall(r"\b[a-z]{3,9}\b", part)})
    gen = data.Gen({"words": words, "glosses": {}}, prose)
    prompts = []
    for topic, tasks in TOPICS.items():
        for _ in range(requests):
            exchange = data.sample_ex(rng, gen, rng.choice(tasks))
            turns = [(past, True) for past in exchange.history] + [(exchange, False)]
            prompts.append((topic, data.render_prompt(exchange.system, exchange.tools, turns, rng.choice(("bare", "think")), None)))
    return prompts + [("prose", data.BOS + rng.choice(prose)) for _ in range(requests)]


class Recorder:
    """Keeps the logical experts that each MoE layer's gate chooses."""

    def __init__(self, llm: LLM):
        self.chosen: list[list[torch.Tensor]] = []
        self.num_experts = 0
        for layer in llm.engine.runner.model.layers:
            if layer.moe is not None:
                self.num_experts = layer.moe.config.num_experts
                self.chosen.append([])
                layer.moe.gate.forward = self._wrap(layer.moe.gate.forward, self.chosen[-1])

    @staticmethod
    def _wrap(forward, kept: list[torch.Tensor]):
        def record(x: torch.Tensor):
            topk_idx, topk_weight = forward(x)
            kept.append(topk_idx.clone())
            return topk_idx, topk_weight

        return record

    def take(self, prompt_len: int) -> tuple[np.ndarray, np.ndarray]:
        """Counts of the positions seen since the last call, before and from `prompt_len` on: two `[layers, experts]`."""
        layers = [torch.cat(kept) for kept in self.chosen]
        for kept in self.chosen:
            kept.clear()

        def count(part: slice) -> np.ndarray:
            return np.stack([np.bincount(layer[part].flatten().numpy(), minlength=self.num_experts) for layer in layers])

        return count(slice(0, prompt_len)), count(slice(prompt_len, None))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=60, help="of each topic")
    parser.add_argument("--out", type=Path, default=ROOT / "bench/traces/tiny_routing.npz")
    args = parser.parse_args()
    topics, prompts = zip(*make_prompts(args.requests), strict=True)
    with LLM(enable_prefix_caching=False, max_num_batched_tokens=4096) as llm:
        answers = llm.generate(list(prompts), SamplingParams(temperature=0, max_tokens=MAX_TOKENS))
        recorder = Recorder(llm)
        counts = []
        for answer in answers:
            # The last token's successor is not computed, so it would route nothing in serving either.
            tokens = answer.prompt_token_ids + answer.outputs[0].token_ids[:-1]
            llm.generate({"prompt_token_ids": tokens}, SamplingParams(max_tokens=1), use_tqdm=False)
            prefill, decode = recorder.take(len(answer.prompt_token_ids))
            counts.append((prefill, decode))
    names = sorted(set(topics), key=topics.index)
    prefill, decode = (np.stack(part).astype(np.uint16) for part in zip(*counts, strict=True))
    topic = np.array([names.index(topic) for topic in topics], np.uint8)
    np.savez_compressed(args.out, names=names, topic=topic, prefill=prefill, decode=decode)
    print(f"{len(topics)} requests, {prefill.sum() + decode.sum()} choices, {args.out.stat().st_size} bytes in {args.out}")
    for name in names:
        mine = np.array(topics) == name
        for phase, part in (("prefill", prefill), ("decode", decode)):
            load = part[mine].sum(0).astype(float)
            print(f"{name if phase == 'prefill' else '':12} {phase:8} busiest / mean by layer", (load.max(-1) / load.mean(-1)).round(2))


if __name__ == "__main__":
    main()
