"""What the routes share: options, model texts, the engine client, and who is being served."""

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from deepserve.control import check_secret
from deepserve.engine.request import SamplingParams
from deepserve.server.client import EngineClient
from deepserve.server.dispatch import HandOffOptions
from deepserve.text.chat import ChatTemplate
from deepserve.text.tokenizer import Tokenizer

_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


class ServerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """By the names of `deepserve serve` flags."""

    model_path: str  # folder with tokenizer and generation_config.json
    served_model_name: tuple[str, ...] = ()  # the first one is answered; empty: the folder's name
    host: str = "127.0.0.1"
    port: int = 8000  # 0: any free one
    api_key: tuple[str, ...] = ()  # any of them opens the routes; empty: no key is asked for
    admin_api_key: tuple[str, ...] = ()  # any of them opens the routes that change the server; empty: they are closed
    chat_template: str | None = None  # file that replaces the model's own
    generation_config: str = "auto"  # "none": OpenAI's sampling defaults instead of the model's
    num_engines: int = 1  # that /ready waits for
    control_address: str = "tcp://127.0.0.1:*"  # ZMQ address to listen on for engines; * any free port
    secret: str = ""  # shared with the engines; needed where other machines reach the address
    engine_silence_limit_s: float = 10.0  # then a rank's requests fail
    engine_quiet_limit_s: float | None = None  # then its instance gets no new ones; None: where its death is seen otherwise
    hand_off: HandOffOptions = HandOffOptions()
    max_body_bytes: int = 16 << 20
    body_timeout_s: float = 60.0  # a client that sends slower is refused: until then it is in flight, and a drain waits for it
    max_concurrent_requests: int = 4096
    shutdown_timeout_s: float | None = None  # of a drain; None: until the last request is done
    access_log: bool = False

    def __post_init__(self):
        """Raises ValueError with the offending value."""
        if not 0 <= self.port < 1 << 16:  # the system would take the lower 16 bits of it
            raise ValueError(f"port must be from 0 to 65535, got {self.port}")
        for name in ("max_body_bytes", "max_concurrent_requests"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.shutdown_timeout_s is not None and not self.shutdown_timeout_s >= 0:
            raise ValueError(f"shutdown_timeout_s must be at least 0, got {self.shutdown_timeout_s}")
        if self.secret:
            check_secret(self.secret)
        if "" in self.api_key:
            raise ValueError("api_key is empty: leave it out to serve without a key")
        if "" in self.admin_api_key:
            raise ValueError("admin_api_key is empty: leave it out to close the routes that need one")
        if "" in self.served_model_name:
            raise ValueError("served_model_name is empty: clients need a name")


class ServerState:
    """Raises ValueError or OSError for a model folder that cannot be served."""

    def __init__(self, options: ServerOptions, client: EngineClient):
        self.options = options
        self.client = client
        self.model_names = options.served_model_name or (Path(options.model_path).resolve().name,)
        self.tokenizer = Tokenizer.from_folder(options.model_path)
        if options.chat_template is None:
            self.template = ChatTemplate.from_folder(options.model_path, self.tokenizer)
        else:
            self.template = ChatTemplate(_read_template(options.chat_template), self.tokenizer)
        self.longest_token_bytes = max(len(self.tokenizer.token_bytes(i)) for i in range(self.tokenizer.vocab_size))
        self.defaults = sampling_defaults(options)
        self.created = int(time.time())
        self.num_engines = options.num_engines
        self.scale_local: Callable[[int], None] | None = None  # the instance of this process; None: others started those that are served
        self.draining = False
        self.num_in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def healthy(self) -> bool:
        return not self.draining and self.client.can_serve

    @property
    def num_wanted(self) -> int:
        """Engine ranks that /ready waits for, with those that instances of a cluster were scaled by."""
        return self.num_engines + self.client.guardians.num_more

    @property
    def ready(self) -> bool:
        return self.healthy and len(self.client.engines) >= self.num_wanted

    async def scale(self, instance: str, dp: int):
        """Have an instance get so many DP replicas. Raises ValueError where that cannot be."""
        if self.scale_local is None:
            await self.client.guardians.scale(instance, dp)
            return
        if instance:
            raise ValueError(f"this server has one instance, which goes without a name, got {instance!r}")
        self.scale_local(dp)
        self.num_engines = dp

    def enter(self):
        self.num_in_flight += 1
        self._idle.clear()

    def leave(self):
        self.num_in_flight -= 1
        if self.num_in_flight == 0:
            self._idle.set()

    async def wait_until_idle(self):
        await self._idle.wait()


def _read_template(path: str) -> str:
    """Raises ValueError."""
    try:
        return Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"chat_template {path!r} cannot be read: {error}") from error


def sampling_defaults(options: ServerOptions) -> dict[str, float]:
    """The model's own sampling settings. Raises ValueError for ones that no request could have."""
    if options.generation_config not in ("auto", "none"):
        raise ValueError(f"generation_config must be 'auto' or 'none', got {options.generation_config!r}")
    path = Path(options.model_path) / "generation_config.json"
    if options.generation_config == "none" or not path.is_file():
        return {}
    config = json.loads(path.read_text("utf-8"))
    defaults = {name: config[name] for name in _DEFAULTS if config.get(name) is not None}
    try:
        SamplingParams(**defaults)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return defaults
