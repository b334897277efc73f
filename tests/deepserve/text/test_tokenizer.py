import copy
import json
import random
import threading

import pytest

from deepserve.text.detokenize import Detokenizer
from deepserve.text.tokenizer import Tokenizer, read_config

TEXTS = {
    "empty": "",
    "english": "Emma Woodhouse, handsome, clever, and rich\n\n  with 347 + 285 = 632!",
    "spaces": "  a\tb \r\n\r\n   c   ",
    "chinese": "从3数到12。人工智能、かな",
    "emoji": "👩‍👩‍👧‍👦 family 🇫🇷 e\u0301 ẞ",
    "controls": "x\x00\x1f\x7f\ufeff\ufffd\ue000\U0010ffff",
    "special": "<｜User｜>Hi<｜Assistant｜></think>ok<｜end▁of▁sentence｜><|EOT|>",
    "begun": "<｜begin▁of▁sentence｜>In the beginning",
    "broken_special": "<｜User| ><<｜User｜>｜><think<think>>",
}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_encode_and_decode_agree_with_transformers(tokenizer, hf, text):
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids == hf.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == hf.decode(ids, skip_special_tokens=True)
    assert tokenizer.decode(ids, skip_special_tokens=False) == hf.decode(ids, skip_special_tokens=False) == text


def test_raw_prompts_of_the_golden_file(tokenizer, golden):
    for case in golden:
        assert tokenizer.encode(case["prompt"]) == case["prompt_ids"], case["name"]
        # The file's text ends at the end token, its ids go on.
        assert tokenizer.decode(case["output_ids"], skip_special_tokens=False).startswith(case["output_text"]), case["name"]


def test_begin_token_comes_once(tokenizer, hf):
    assert tokenizer.encode("Hi") == hf.encode("Hi") == [tokenizer.bos_token_id, *tokenizer.encode("Hi", add_special_tokens=False)]
    assert tokenizer.encode("<｜begin▁of▁sentence｜>Hi") == tokenizer.encode("Hi")
    # Not parsed, the spelling is text, and the begin token still comes.
    assert tokenizer.encode("<｜begin▁of▁sentence｜>Hi", parse_special=False)[0] == tokenizer.bos_token_id


def test_unparsed_text_never_becomes_a_control_token(tokenizer):
    rng = random.Random(0)
    pieces = [*tokenizer.added_tokens, "<", "｜", "▁", ">", "think", " ", "User", "x"]
    for _ in range(300):
        text = "".join(rng.choices(pieces, k=6))
        ids = tokenizer.encode(text, add_special_tokens=False, parse_special=False)
        assert not set(ids) & set(tokenizer.added_tokens.values())
        assert tokenizer.decode(ids) == text


def test_ids(tokenizer):
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.vocab_size) == (0, 1, 4096)
    assert tokenizer.special_ids == {0, 1, 2, 4086}  # role and tool tokens are not flagged: they survive skip_special_tokens
    assert tokenizer.added_tokens["<think>"] == 4079
    assert tokenizer.named_tokens["pad_token"] == "<｜▁pad▁｜>"


def test_token_bytes_join_to_the_text(tokenizer):
    text = "".join(TEXTS.values())
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()
    split = tokenizer.encode("🦊", add_special_tokens=False)
    assert len(split) > 1 and "\ufffd" in tokenizer.id_to_text(split[0])


def test_ids_of_a_padded_vocabulary_are_empty(tokenizer):
    for token_id in (4096, 129279, 1 << 40, -1):
        assert tokenizer.token_bytes(token_id) == b"" and tokenizer.id_to_text(token_id) == ""
    assert tokenizer.decode([4096, *tokenizer.encode("a"), -1]) == "a"


def test_refusals(tokenizer, tmp_path):
    with pytest.raises(ValueError, match=r"lone surrogate U\+D800 at character 2"):
        tokenizer.encode("ab\ud800")
    with pytest.raises(ValueError, match="must be text, got int"):
        tokenizer.encode(3)
    with pytest.raises(ValueError, match=r"has no tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)


def test_only_byte_level_bpe(model_folder):
    spec = json.loads((model_folder / "tokenizer.json").read_text())
    with pytest.raises(ValueError, match="decoder 'Metaspace'"):
        Tokenizer({**spec, "decoder": {"type": "Metaspace"}}, {})


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"model": 1}', '{"model": {}, "decoder": {"type": "ByteLevel"}}', None])
def test_damaged_files_are_told(tmp_path, model_folder, name, text):
    folder = tmp_path / "model"
    folder.mkdir()
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (folder / file).write_bytes((model_folder / file).read_bytes())
    (folder / name).unlink()
    if text is None:
        (folder / name).mkdir()
    else:
        (folder / name).write_text(text)
    if name == "tokenizer.json" or text in ("", "{", "[]"):
        with pytest.raises(ValueError, match=str(folder)):
            Tokenizer.from_folder(folder)
    else:
        Tokenizer.from_folder(folder)


@pytest.mark.parametrize("parse", [True, False])
def test_a_long_text_lets_other_threads_run(tokenizer, parse):
    done = threading.Event()
    worker = threading.Thread(target=lambda: (tokenizer.encode("the sea " * 40_000, parse_special=parse), done.set()))
    worker.start()
    num_turns = 0
    while not done.wait(0.001):
        num_turns += 1
    worker.join()
    assert num_turns > 5


def test_config_decides_on_the_begin_token(model_folder):
    spec, config = json.loads((model_folder / "tokenizer.json").read_text()), read_config(model_folder)
    assert Tokenizer(spec, {**config, "add_bos_token": False}).encode("a")[0] != 0
    undecided = {name: value for name, value in config.items() if name != "add_bos_token"}
    assert Tokenizer(spec, undecided).encode("a")[0] == 0  # by the post-processor
    assert Tokenizer({**spec, "post_processor": None}, undecided).encode("a")[0] != 0
    with pytest.raises(ValueError, match="no bos_token"):
        Tokenizer({**spec, "post_processor": None}, {"add_bos_token": True})


def test_control_tokens_known_only_to_the_config_are_control_tokens(model_folder):
    """Some folders list the end token in the BPE vocabulary and name it in tokenizer_config.json only."""
    spec = copy.deepcopy(json.loads((model_folder / "tokenizer.json").read_text()))
    token = next(token for token in spec["added_tokens"] if token["content"] == "<|EOT|>")
    spec["added_tokens"].remove(token)
    spec["model"]["vocab"]["<|EOT|>"] = token["id"]
    tokenizer = Tokenizer(spec, {"eos_token": {"content": "<|EOT|>", "lstrip": False}})
    assert tokenizer.eos_token_id == token["id"] and token["id"] in tokenizer.special_ids
    assert tokenizer.encode("<|EOT|>", add_special_tokens=False) == [token["id"]]
    assert token["id"] not in tokenizer.encode("<|EOT|>", parse_special=False)


def test_limits_left_in_the_file_do_not_cut_prompts(model_folder):
    spec = json.loads((model_folder / "tokenizer.json").read_text())
    spec["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    assert len(Tokenizer(spec, {}).encode("one two three four five six")) > 3


@pytest.mark.parametrize("skip", [True, False])
def test_pieces_are_decode_of_all_ids(tokenizer, hf, skip):
    rng = random.Random(1)
    texts = [tokenizer.encode(text) for text in TEXTS.values()]
    noise = [[rng.randrange(-1, 4100) for _ in range(40)] for _ in range(200)]
    for ids in texts + noise:
        detokenizer, pieces, start = Detokenizer(tokenizer, skip), [], 0
        while start < len(ids):
            end = start + rng.randint(1, 3)
            pieces.append(detokenizer.push(ids[start:end]))
            start = end
        pieces.append(detokenizer.finish())
        assert "".join(pieces) == tokenizer.decode(ids, skip)
    for ids in texts:
        assert tokenizer.decode(ids, skip) == hf.decode(ids, skip_special_tokens=skip)


def test_incomplete_characters_wait(tokenizer):
    ids = tokenizer.encode("a🦊b", add_special_tokens=False)
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.push([token_id]) for token_id in ids]
    assert [piece for piece in pieces if piece] == ["a", "🦊", "b"]
    assert detokenizer.push(ids[1:-2]) == ""  # all of the fox but its last token
    assert detokenizer.finish() == "\ufffd"
