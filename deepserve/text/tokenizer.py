"""Text to token ids and back, for byte-level BPE vocabularies (all DeepSeek-class models have one)."""

import json
from collections.abc import Iterable
from pathlib import Path

import tokenizers


def check_text(text: str, what: str = "the text") -> None:
    """Raise ValueError unless `text` is a str that UTF-8 can carry, that is: without lone surrogates."""
    if not isinstance(text, str):
        raise ValueError(f"{what} must be text, got {type(text).__name__}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as err:
        raise ValueError(f"{what} is not valid Unicode: lone surrogate U+{ord(text[err.start]):04X} at character {err.start}") from None


class Tokenizer:
    """The vocabulary of one model; immutable and safe to share between threads.

    `special_ids` are the ids that `skip_special_tokens` leaves out of text; `added_tokens` maps the spelling of every token that the
    BPE does not make (control tokens among them, special or not) to its id; `named_tokens` are the spellings that the model's
    configuration names ("bos_token", "eos_token", ...).
    """

    def __init__(self, spec: dict, config: dict):
        """`spec` and `config` are the contents of tokenizer.json and tokenizer_config.json. Raises ValueError if not byte-level BPE."""
        model, decoder = ((spec.get(name) or {}).get("type", default) for name, default in (("model", "BPE"), ("decoder", None)))
        if model != "BPE" or decoder != "ByteLevel":
            raise ValueError(f"only byte-level BPE tokenizers are supported, this one has model {model!r} and decoder {decoder!r}")
        self._full = _load(spec)
        self.named_tokens = {name: text for name, text in _named_tokens(config) if self._full.token_to_id(text) is not None}
        listed = {token.content for token in self._full.get_added_tokens_decoder().values()}
        self._full.add_special_tokens([text for text in self.named_tokens.values() if text not in listed])
        added = self._full.get_added_tokens_decoder()
        self.added_tokens: dict[str, int] = {token.content: token_id for token_id, token in added.items()}
        self._plain = _load(_without_added_tokens(spec, set(added)))
        self.bos_token_id = self._named_id("bos_token")
        self.eos_token_id = self._named_id("eos_token")
        flagged = {token_id for token_id, token in added.items() if token.special}
        self.special_ids = frozenset(flagged | {self._named_id(name) for name in self.named_tokens})
        self._bytes = _byte_table(self._full.get_vocab(with_added_tokens=False), self.added_tokens)
        self._adds_bos = config.get("add_bos_token")
        if self._adds_bos is None:  # then the post-processor decides
            self._adds_bos = self.bos_token_id in self._full.encode("").ids
        if self._adds_bos and self.bos_token_id is None:
            raise ValueError("tokenizer_config.json has add_bos_token but no bos_token of the vocabulary")

    @classmethod
    def from_folder(cls, folder: str | Path) -> "Tokenizer":
        """Load a Hugging Face model folder. Raises ValueError if it has no tokenizer of a supported kind."""
        folder = Path(folder)
        if not (folder / "tokenizer.json").is_file():
            raise ValueError(f"{folder} has no tokenizer.json")
        spec, config = _read_json(folder / "tokenizer.json"), read_config(folder)
        try:
            return cls(spec, config)
        except (AttributeError, KeyError, TypeError) as error:  # keys that are missing or hold something else
            raise ValueError(f"{folder} holds no tokenizer that can be read: {error!r}") from error
        except ValueError as error:
            raise ValueError(f"{folder}: {error}") from error

    def _named_id(self, name: str) -> int | None:
        return self._full.token_to_id(self.named_tokens[name]) if name in self.named_tokens else None

    @property
    def vocab_size(self) -> int:
        """One more than the highest id the tokenizer knows; the model's own vocabulary may be padded beyond it."""
        return len(self._bytes)

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids of a raw prompt.

        `add_special_tokens` puts the begin token first if the model wants one and the parsed text does not already start with it.
        `parse_special` turns spellings of control tokens into those tokens; without it they are plain text and no text whatever
        becomes a control token. Raises ValueError for text with lone surrogates.
        """
        check_text(text)
        # `encode` of the library keeps other threads from running for as long as it takes; this one does not.
        ids = (self._full if parse_special else self._plain).encode_batch_fast([text], add_special_tokens=False)[0].ids
        if add_special_tokens and self._adds_bos and ids[:1] != [self.bos_token_id]:
            ids.insert(0, self.bos_token_id)
        return ids

    def token_bytes(self, token_id: int) -> bytes:
        """What one token stands for: perhaps a part of a character. Empty for ids that the tokenizer does not know."""
        return self._bytes[token_id] if 0 <= token_id < len(self._bytes) else b""

    def joined_bytes(self, ids: Iterable[int], skip_special_tokens: bool = True) -> bytes:
        """The bytes that a run of tokens stands for."""
        skipped = self.special_ids if skip_special_tokens else ()
        return b"".join(self.token_bytes(token_id) for token_id in ids if token_id not in skipped)

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Text of tokens; bytes that are no UTF-8 become U+FFFD."""
        return self.joined_bytes(ids, skip_special_tokens).decode("utf-8", "replace")

    def id_to_text(self, token_id: int) -> str:
        """One token for display beside its log-probability; `token_bytes` is the exact form."""
        return self.token_bytes(token_id).decode("utf-8", "replace")


def read_config(folder: Path) -> dict:
    """Contents of tokenizer_config.json, empty if the folder has none."""
    path = folder / "tokenizer_config.json"
    return _read_json(path) if path.is_file() else {}


def _read_json(path: Path) -> dict:
    try:
        value = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value


def _load(spec: dict) -> tokenizers.Tokenizer:
    try:
        tokenizer = tokenizers.Tokenizer.from_str(json.dumps(spec))
    except Exception as error:  # the library raises nothing more precise
        raise ValueError(f"tokenizer.json does not describe a tokenizer: {error}") from error
    tokenizer.no_truncation()  # a limit left in the file would cut prompts without a word
    tokenizer.no_padding()
    return tokenizer


def _without_added_tokens(spec: dict, added: set[int]) -> dict:
    """The twin for plain text. It lacks the added tokens' entries in the BPE vocabulary too, so it cannot make one at all."""
    vocab = {text: token_id for text, token_id in spec["model"]["vocab"].items() if token_id not in added}
    return {**spec, "added_tokens": [], "post_processor": None, "model": {**spec["model"], "vocab": vocab}}


def _named_tokens(config: dict) -> Iterable[tuple[str, str]]:
    for name, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            yield name, text


def _byte_table(vocab: dict[str, int], added: dict[str, int]) -> list[bytes]:
    """Bytes of every id. Vocabulary entries are spelled in GPT-2's alphabet: one printable character for each byte."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
    table = [b""] * (max([*vocab.values(), *added.values()]) + 1)
    for text, token_id in vocab.items():
        table[token_id] = bytes(alphabet[c] for c in text) if all(c in alphabet for c in text) else text.encode()
    for text, token_id in added.items():
        table[token_id] = text.encode()
    return table
