"""``whet serve``: serves a model with the interfaces of OpenAI, vLLM, Anthropic and Ollama."""

from __future__ import annotations

import dataclasses
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from whet.cli.settings import parse_flags
from whet.cli.text_options import DraftSettings, EngineSettings
from whet.config.fields import (
    Count,
    OptionalAboveZero,
    OptionalCount,
    OptionalPositive,
    PathText,
    Positive,
    check_types,
)
from whet.engine.checks import LogprobsMode
from whet.errors import WhetValueError
from whet.models.formats import KvDtype, Weights
from whet.text.checkpoint_model import resolve_adapter

if TYPE_CHECKING:
    from starlette.applications import Starlette

_WHERE = "whet serve"
_LOCAL = ("localhost", "127.0.0.1", "::1")
_KEEP_ALIVE_S = 75
"""Time that a connection may be idle. Clients keep theirs for up to 60 s; a request on one that the server is closing
fails."""


@dataclasses.dataclass(kw_only=True)
class ServeConfig(EngineSettings, DraftSettings):
    """Serve a model with the interfaces of OpenAI, vLLM, Anthropic and Ollama, and a page for chats at /."""

    model: Annotated[tyro.conf.Positional[PathText], tyro.conf.arg(metavar="MODEL")]
    """A folder that save_pretrained or whet train wrote, a checkpoint, a .gguf file, or a name on the hub."""
    name: str = ""
    """Name of the model in requests; empty: the name of its folder or file."""
    adapter: list[str] = dataclasses.field(default_factory=list)
    """LoRA adapters that requests choose by the field model: NAME=FOLDER."""
    adapter_folder: PathText = ""
    """Folder below which clients may load further adapters (/v1/load_lora_adapter); empty: none may."""
    weights: Weights | None = None
    """Weight format. Default: the format of the adapters' base, the GGUF file's own format, or bf16 for folders."""
    context: OptionalCount = None
    """The most tokens of a prompt and its completion. Default: what the model's positions and the KV cache permit."""
    kv_bytes: OptionalCount = None
    """Memory of keys and values, of running requests and of the prefix cache. A request waits until its longest
    completion fits. Default: a quarter of the unused memory, from 1 to 4 GiB."""
    logprobs_mode: LogprobsMode = "model"
    """Distribution of the log-probs of sampled tokens: the model's at temperature 1, or (sampling) the one that they
    were drawn from, as trainers need."""
    kv_dtype: KvDtype | None = None
    """Format of keys and values; q8: 8 bits, about half of the memory of bfloat16. Default: float32 with float32
    weights, else bfloat16."""
    tokenizer: PathText = ""
    """A folder or .gguf file with the tokenizer; empty: the model's."""
    chat_template: PathText = ""
    """A file with a Jinja chat template; empty: the one saved with the adapters, or else the tokenizer's."""
    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0: all."""
    port: int = 8000
    """Port to listen on; 0: any free one."""
    allowed_hosts: list[str] = dataclasses.field(default_factory=list)
    """Further names by which clients may address the server (their Host header). On an address other than this
    machine's own, any name is allowed unless there are some."""
    api_key_file: PathText = ""
    """A file with an accepted API key per line; empty: no key is needed."""
    max_requests: Positive = 256
    """Prompts that may be queued and running at once; further requests are rejected with the status 429."""
    max_requests_per_key: OptionalPositive = None
    """Prompts of one API key that may be queued and running at once. Default: no further limit."""
    max_seconds: OptionalAboveZero = None
    """Time that a request may take; then it ends with the status 504, or with an error in its stream. Default: any."""
    drain_seconds: Count = 30
    """Time that requests have to end after SIGTERM or Ctrl-C."""

    def check(self) -> None:
        """Check the settings, before anything is loaded.

        Raises:
            WhetValueError: names the setting.
        """
        check_types(self)
        if not 0 <= self.port <= 65535:
            raise WhetValueError(f"{_WHERE}: port is {self.port}, expected a number from 0 to 65535.")
        if self.max_requests_per_key is not None and not self.api_key_file:
            raise WhetValueError(f"{_WHERE}: max_requests_per_key has no effect without --api-key-file.")
        if self.adapter_folder and not Path(self.adapter_folder).is_dir():
            raise WhetValueError(f"{_WHERE}: adapter_folder {self.adapter_folder!r} is not a folder.")

    def adapters(self) -> Mapping[str, str]:
        """Return the folder of each adapter by name."""
        found: dict[str, str] = {}
        for text in self.adapter:
            name, separator, folder = text.partition("=")
            if not (separator and name and folder):
                raise WhetValueError(f"{_WHERE}: adapter is {text!r}, expected NAME=FOLDER.")
            if name in found:
                raise WhetValueError(f"{_WHERE}: two adapters have the name {name!r}. Rename one.")
            found[name] = folder
        return found

    def keys(self) -> list[str]:
        """Return the accepted API keys."""
        if not self.api_key_file:
            return []
        try:
            lines = Path(self.api_key_file).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise WhetValueError(f"{_WHERE}: api_key_file {self.api_key_file!r} cannot be read: {error}.") from error
        keys = [line.strip() for line in lines if line.strip()]
        if not keys:
            raise WhetValueError(f"{_WHERE}: api_key_file {self.api_key_file!r} is empty, expected a key per line.")
        return keys

    def hosts(self) -> list[str]:
        """Return the names that are answered; empty: all."""
        if self.host in _LOCAL:
            return [*_LOCAL, *self.allowed_hosts]
        return [self.host, *_LOCAL, *self.allowed_hosts] if self.allowed_hosts else []


def main(argv: Sequence[str]) -> int:
    """Serve until Ctrl-C or SIGTERM, and return 0."""
    options = parse_flags(ServeConfig, argv, _WHERE)
    options.check()

    adapters, keys = options.adapters(), options.keys()

    import uvicorn

    sys.setswitchinterval(2e-4)  # the engine's thread waits for the interpreter's lock after every step
    threading.stack_size(16 << 20)  # grammars are compiled by recursion; some systems have 512 KiB

    from whet.serve import LoadingApp, ServedModel, make_app
    from whet.serve.connection import Connection
    from whet.serve.threads import listen

    path, adapter = resolve_adapter(options.model, "", _WHERE)
    with listen(options.host, options.port, _WHERE) as listening:
        failure: Exception | None = None
        lines: list[str] = []

        def load() -> Starlette:
            model = ServedModel.load(
                path, adapter=adapter, name=options.name or Path(options.model).stem, weights=options.weights,
                context=options.context, kv_bytes=options.kv_bytes, kv_dtype=options.kv_dtype,
                expert_bytes=options.expert_bytes, draft=options.draft, device=options.device, adapters=adapters,
                tokenizer=options.tokenizer, chat_template=options.chat_template, logprobs_mode=options.logprobs_mode,
            )  # fmt: skip
            address = f"[{options.host}]" if ":" in options.host else options.host
            lines.append(
                f"http://{address}:{listening.getsockname()[1]}/v1 serves {', '.join(model.adapters)} (context "
                f"{model.context:,} tokens)"
            )
            return make_app(
                model, api_keys=keys, max_requests=options.max_requests, max_seconds=options.max_seconds,
                max_requests_per_key=options.max_requests_per_key, hosts=options.hosts(),
                adapter_folder=options.adapter_folder,
            )  # fmt: skip

        def end(error: Exception | None) -> None:
            nonlocal failure
            failure = error
            if error is None:
                print(*lines, file=sys.stderr, flush=True)
            else:
                server.should_exit = True

        config = uvicorn.Config(
            LoadingApp(load, end), http=Connection, ws="none", log_level="warning", access_log=False,
            timeout_keep_alive=_KEEP_ALIVE_S, timeout_graceful_shutdown=options.drain_seconds,
        )  # fmt: skip
        server = uvicorn.Server(config)
        server.run(sockets=[listening])
    if failure is not None:
        raise failure
    return 0
