"""The model that a server serves: engine, tokenizer, adapters by name, and the defaults of requests."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from whet.config.sampling import SamplingParams
from whet.config.settings import Device
from whet.engine import Engine
from whet.engine.checks import LogprobsMode
from whet.engine.grammar import Grammars
from whet.errors import WhetValueError
from whet.models.adapter_files import has_reward_head
from whet.models.sources.folder import is_classifier_folder
from whet.models.sources.gguf_container import GGUFFile
from whet.models.tokenizers.token_texts import TokenTexts, read_token_texts
from whet.serve.errors import ApiError
from whet.system.memory import unused_bytes
from whet.text.model import find_model, find_stop_ids, load_chat_tokenizer, load_engine, longest_sequence
from whet.text.replies import ReplyFormat
from whet.text.reward_model import RewardHead, add_reward_adapter, read_reward_head

_WHERE = "whet serve"
_KV_BYTES = (1 << 30, 4 << 30)
"""Limits of the default KV cache."""
_LEAST_TEXT = 1 << 20
"""Bytes of text that are tokenised in any case."""


def _is_utf8(text: bytes) -> bool:
    """Whether a text is valid UTF-8."""
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


class ServedModel:
    """A model and its adapters.

    Args:
        engine: samples and scores.
        tokenizer: with ``encode``, ``decode``, ``apply_chat_template`` and ``chat_template``.
        name: of the model in requests.
        stop_ids: tokens that end a completion.
        adapters: name -> folder of LoRA adapters.
        adapter: folder of the adapters that ``name`` has; empty: none. The model without them is ``name``-base.
        defaults: sampling settings of requests that set none.
        context: the most tokens of a prompt and its completion. Default: what positions and KV cache permit.
        path: folder or file of the weights, for ``reload``; empty: they cannot be read again.
        pooling: of embeddings, if a request does not choose it.
        logprobs_mode: of the log-probs of sampled tokens, see ``Engine.generate``.
        fingerprint: names the weights. Default: their digest.
        head: of a model that is a reward model.

    Attributes:
        texts: of every token.
        adapters: name -> number of the adapter on the engine; None: the model itself.
        loaded: names of the adapters that were added by ``load_adapter``.
        heads: name -> head of the models and adapters that are reward models.
        created: Unix time in seconds.
        replies: the form of the model's replies.
        fingerprint: see above; the digest includes the model's own adapter.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Any,
        name: str,
        stop_ids: list[int],
        adapters: Mapping[str, str] | None = None,
        adapter: str = "",
        defaults: Mapping[str, float] | None = None,
        context: int | None = None,
        path: str = "",
        pooling: str = "last",
        logprobs_mode: LogprobsMode = "model",
        fingerprint: str = "",
        head: RewardHead | None = None,
    ) -> None:
        self.engine, self.tokenizer, self.name = engine, tokenizer, name
        self.stop_ids, self.defaults = stop_ids, dict(defaults or {})
        engine.tokenizer = tokenizer
        self.texts: TokenTexts = read_token_texts(tokenizer, _WHERE)
        most = longest_sequence(engine)
        if most < 2:
            raise WhetValueError(
                f"{_WHERE}: a KV cache of {engine.memory['kv_bytes']:,} bytes is too small. Raise --kv-bytes."
            )
        if context is not None and not 2 <= context <= most:
            raise WhetValueError(f"{_WHERE}: context is {context}, expected from 2 to {most:,} tokens.")
        self.context = context or most
        self.adapters: dict[str, int | None] = {name: None}
        self.heads = {} if head is None else {name: head}
        if adapter:
            self.adapters = {name: self._add_adapter(name, adapter)}
            if not engine.merged_adapter:
                self.adapters[f"{name}-base"] = None
        for each, folder in (adapters or {}).items():
            if each in self.adapters:
                raise WhetValueError(f"{_WHERE}: two models or adapters have the name {each!r}. Rename one.")
            self.adapters[each] = self._add_adapter(each, folder)
        self.loaded: tuple[str, ...] = ()
        self.created = int(time.time())
        self.replies = ReplyFormat(tokenizer, self.texts)
        self._path, self._adapter, self.pooling, self.logprobs_mode = path, adapter, pooling, logprobs_mode
        self.fingerprint = fingerprint or self._make_fingerprint()

    @classmethod
    def load(
        cls,
        path: str,
        *,
        name: str = "",
        weights: str | None = None,
        context: int | None = None,
        kv_bytes: int | None = None,
        kv_dtype: str | None = None,
        expert_bytes: int = 0,
        adapters: Mapping[str, str] | None = None,
        adapter: str = "",
        tokenizer: str = "",
        chat_template: str = "",
        logprobs_mode: LogprobsMode = "model",
        draft: str = "",
        device: Device = "cpu",
    ) -> ServedModel:
        """Load a folder or GGUF file.

        Args:
            kv_bytes: size of the KV cache. Default: a quarter of the unused memory, from 1 to 4 GiB.
            kv_dtype: format of keys and values. Default: as in ``Engine``.
            expert_bytes: as in ``Engine``.
            draft: a folder or GGUF file with the draft model; empty: none.
            device: as in ``Engine``.

        Raises:
            WhetValueError: model, tokenizer or adapters cannot be read, or do not fit each other.
        """
        model = find_model(path, _WHERE)
        loaded = load_chat_tokenizer(model, _WHERE, chat_template, adapter, tokenizer)
        first = adapter or next(iter((adapters or {}).values()), "")  # may record the format of its base
        kv_bytes = kv_bytes or max(_KV_BYTES[0], min(_KV_BYTES[1], unused_bytes() // 4))
        head = read_reward_head(path) if is_classifier_folder(path) else None
        scores = head is not None
        if scores and draft:
            raise WhetValueError(
                f"{_WHERE}: draft is {draft!r}, and {path} is a reward model, which has no tokens to draft."
            )
        engine = load_engine(
            model, weights, context, _WHERE, first, kv_bytes, kv_dtype, expert_bytes, scores, draft, device
        )
        stop_ids = find_stop_ids(path, loaded, engine.config.vocab_size, _WHERE)
        name = name or Path(path).stem
        return cls(
            engine, loaded, name, stop_ids, adapters, adapter, read_defaults(path), context, path, read_pooling(model),
            logprobs_mode, head=head,
        )  # fmt: skip

    def _make_fingerprint(self) -> str:
        digest = hashlib.sha256(self.engine.fingerprint().encode())
        if self._adapter:
            digest.update((Path(self._adapter) / "adapter_model.safetensors").read_bytes())
        return "whet-" + digest.hexdigest()[:16]

    def _add_adapter(self, name: str, folder: str) -> int:
        """Add the adapters of a folder, and of a reward model the head."""
        if not has_reward_head(folder):
            return self.engine.add_adapter(folder)
        number, self.heads[name] = add_reward_adapter(self.engine, folder, _WHERE)
        return number

    def load_adapter(self, name: str, adapter: Any) -> None:
        """Add an adapter, see ``Engine.add_adapter``, or replace the one that was loaded under this name."""
        number, before = self.engine.add_adapter(adapter), self.adapters.get(name)
        self.adapters = {**self.adapters, name: number}  # a new object: other threads may iterate over the old one
        if before is None:
            self.loaded = (*self.loaded, name)
        else:
            self.engine.remove_adapter(before)

    def unload_adapter(self, name: str) -> None:
        """Remove an adapter that was loaded; running requests end with it."""
        number = self.adapters[name]
        assert number is not None, "a loaded adapter has a number"
        self.adapters = {other: each for other, each in self.adapters.items() if other != name}
        self.loaded = tuple(other for other in self.loaded if other != name)
        self.engine.remove_adapter(number)

    def reload(self) -> None:
        """Read the weights again; of a model with its own adapter, only the adapter, which its base does not change.

        Raises:
            WhetError: the files cannot be read, belong to another model, or a completion is in progress.
        """
        if not self._path:
            raise WhetValueError(f"{_WHERE}: the model was not loaded from a path, so that it cannot be read again.")
        if self.engine.merged_adapter:
            raise WhetValueError(f"{_WHERE}: {self._adapter} is merged into the weights. Restart the server.")
        if self._adapter:
            before = self.adapters[self.name]
            self.adapters[self.name] = self._add_adapter(self.name, self._adapter)
            assert before is not None, "the model has its own adapter"
            self.engine.remove_adapter(before)
        elif self.heads:
            raise WhetValueError(f"{_WHERE}: a reward model with all weights is not read again. Restart the server.")
        else:
            self.engine.sync(self._path)
        self.fingerprint = self._make_fingerprint()

    @cached_property
    def grammars(self) -> Grammars:
        """Compiles grammars for the tokenizer."""
        return Grammars(self.tokenizer, self.engine.config.vocab_size, self.stop_ids)

    # Lists, since a response may hold thousands of tokens.

    @cached_property
    def token_bytes(self) -> list[bytes]:
        """The text of each token; of a special token, its name."""
        special = {token_id: text.encode() for text, token_id in self.texts.special_ids.items()}
        texts = self.texts
        n = max(self.engine.config.vocab_size, len(texts.tokens), *(i + 1 for i in special))
        return [special[i] if i in special else texts.bytes_in_text(i) for i in range(n)]

    @cached_property
    def token_texts(self) -> list[str]:
        """The text of each token; bytes that are not UTF-8 become U+FFFD."""
        return [text.decode(errors="replace") for text in self.token_bytes]

    @cached_property
    def token_keys(self) -> list[str]:
        """The text of each token, or ``bytes:\\xe2\\x80`` if it is not UTF-8, so that different tokens have different
        keys."""
        return [
            "bytes:" + "".join(f"\\x{byte:02x}" for byte in text)
            if "\ufffd" in decoded and not _is_utf8(text)
            else decoded
            for text, decoded in zip(self.token_bytes, self.token_texts, strict=True)
        ]

    @cached_property
    def most_text(self) -> int:
        """Bytes of the largest text that is tokenised: more never fit the context, but take seconds and gigabytes.

        Normalisation makes texts shorter, by a factor of at most 3 (NFC).
        """
        longest = max(len(text) for text in (*self.texts.tokens, *self.texts.special_ids))
        return max(_LEAST_TEXT, 4 * longest * self.context)

    def check_text(self, *texts: str) -> None:
        """Raise a 400 if texts of a prompt are too large to be tokenised."""
        n_bytes = sum(len(text.encode(errors="replace")) for text in texts)
        if n_bytes > self.most_text:
            raise ApiError(
                400,
                f"This model's maximum context length is {self.context} tokens, which no text of {n_bytes:,} bytes "
                f"fits. Shorten the prompt to at most {self.most_text:,} bytes.",
                "messages",
                "context_length_exceeded",
            )

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Return the tokens of a request's text."""
        self.check_text(text)
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def adapter_of(self, name: str) -> int | None:
        """Return the adapter of a request's ``model``; "" is the model itself.

        Raises:
            ApiError: 404: the model does not exist.
        """
        if name and name not in self.adapters:
            known = ", ".join(self.adapters)
            raise ApiError(404, f"The model {name!r} does not exist. Models: {known}.", "model", "model_not_found")
        return self.adapters[name or self.name]

    def check_writes(self, name: str) -> None:
        """Check ``adapter_of``, and that the model predicts tokens.

        Raises:
            ApiError: 404: the model does not exist; 400: it is a reward model.
        """
        self.adapter_of(name)
        if (name or self.name) in self.heads:
            raise ApiError(400, f"The model {name or self.name!r} is a reward model. Send texts to /score.", "model")

    def check_tokens(self, ids: Sequence[Any], name: str) -> list[int]:
        """Return the token ids of a request's field.

        Raises:
            ApiError: 400: one is not in the vocabulary.
        """
        size = self.engine.config.vocab_size
        for token_id in ids:
            if not isinstance(token_id, int) or isinstance(token_id, bool) or not 0 <= token_id < size:
                raise ApiError(400, f"{name} holds {token_id!r:.40}, expected token ids from 0 to {size - 1}.", name)
        return list(ids)

    def check_prompt(self, ids: Sequence[Any], name: str) -> list[int]:
        """Return ``check_tokens``, of which there has to be at least one."""
        if not ids:
            raise ApiError(400, f"{name} is empty, expected at least one token.", name)
        return self.check_tokens(ids, name)

    def sampling(self, settings: Mapping[str, Any]) -> SamplingParams:
        """Return sampling settings, of which the defaults are the model's."""
        return SamplingParams(**{**self.defaults, **settings})


def read_defaults(path: str) -> dict[str, float]:
    """Return temperature, top_k and top_p of a folder's generation_config.json; empty if it has none."""
    file = Path(path) / "generation_config.json"
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(found, dict) or not found.get("do_sample"):
        return {}
    return {
        name: found[name] for name in ("temperature", "top_k", "top_p") if isinstance(found.get(name), (int, float))
    }


def read_pooling(model: str | GGUFFile) -> str:
    """Return the pooling of a model's embeddings; "last" unless sentence-transformers' folder or a GGUF file names it.

    Other kinds than "last" and "mean" are returned by their names, which a request has to replace.
    """
    if isinstance(model, GGUFFile):
        architecture = model.metadata.get("general.architecture")
        return {1: "mean"}.get(model.metadata.get(f"{architecture}.pooling_type", 0), "last")
    try:
        found = json.loads((Path(model) / "1_Pooling" / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return "last"
    names = [name for name, value in found.items() if name.startswith("pooling_mode_") and value is True]
    name = str(found.get("pooling_mode") or (names or ["lasttoken"])[0]).removeprefix("pooling_mode_")
    return {"lasttoken": "last", "mean_tokens": "mean"}.get(name, name)
