import json
from pathlib import Path

import pytest
import transformers

import deepserve
from deepserve.text.chat import ChatTemplate
from deepserve.text.tokenizer import Tokenizer

MODEL = Path(deepserve.__file__).parent / "models" / "deepserve-tiny"


@pytest.fixture(scope="session")
def model_folder() -> Path:
    return MODEL


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(MODEL)


@pytest.fixture(scope="session")
def chat(tokenizer) -> ChatTemplate:
    return ChatTemplate.from_folder(MODEL, tokenizer)


@pytest.fixture(scope="session")
def hf():
    """The outside reference: transformers' tokenizer of the shipped model."""
    return transformers.PreTrainedTokenizerFast.from_pretrained(MODEL)


@pytest.fixture(scope="session")
def golden() -> list[dict]:
    return json.loads((MODEL / "expected.json").read_text())["cases"]
