"""deepserve: serving DeepSeek-class mixture-of-experts models. Public names load on first use, torch only with `LLM`."""

from importlib import import_module

_HOMES = {
    "LLM": "deepserve.llm",
    "RequestOutput": "deepserve.llm",
    "SamplingParams": "deepserve.engine.request",
    "EngineArgs": "deepserve.config",
    "EngineConfig": "deepserve.config",
}
__all__ = list(_HOMES)
__version__ = "0.1.0"


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module 'deepserve' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
