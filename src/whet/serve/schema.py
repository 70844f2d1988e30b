"""Fields of requests: types, ranges, and what is refused.

A field that changes the meaning of a request and has no effect here is refused by name (``_REFUSED``). Fields without
influence on the answer (user, store, metadata) are accepted, as are unknown fields. null is the default of every field.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from whet.config.fields import OptionalCount, Positive, check_types
from whet.errors import WhetError
from whet.serve.errors import ApiError

Kind = TypeVar("Kind")

MOST_CHOICES, MOST_ALTERNATIVES, MOST_PROMPTS, MOST_LABELS = 128, 20, 2048, 255

_SAMPLING = {  # of a request -> of SamplingParams
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "logit_bias": "logit_bias",
    "stop": "stop",
    "min_tokens": "min_new_tokens",
}
EXTRAS = (
    "seed", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias",
    "stop_token_ids", "min_tokens", "ignore_eos", "chat_template_kwargs", "structured_outputs",
)  # fmt: skip
"""Fields of chats that the interfaces which are translated to chats have under the same names, or lack."""
_REFUSED = (
    "echo", "suffix", "audio", "functions", "function_call", "include_stop_str_in_output", "truncate_prompt_tokens",
    "logprob_token_ids", "allowed_token_ids", "bad_words", "documents", "thinking_token_budget", "reasoning_effort",
    "guided_json", "guided_regex", "guided_choice", "guided_grammar", "repetition_detection",
    "use_beam_search", "length_penalty", "tools", "tool_choice", "web_search_options",
    "prompt_embeds", "skip_special_tokens", "chat_template",
)  # fmt: skip
_WITHOUT_EFFECT: dict[str, Any] = {
    "tool_choice": "none",
    "length_penalty": 1,
    "truncate_prompt_tokens": -1,
    "skip_special_tokens": True,
}
"""Values of refused fields that ask for nothing."""


@dataclass(kw_only=True)
class StreamOptions:
    """``stream_options``."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False


@dataclass(kw_only=True)
class Request:
    """Fields of every request that samples; None: the model's default."""

    model: str = ""
    n: Positive = 1
    stream: bool = False
    stream_options: dict = field(default_factory=dict)
    max_tokens: OptionalCount = None
    seed: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict = field(default_factory=dict)
    stop: str | list = field(default_factory=list)
    stop_token_ids: list = field(default_factory=list)
    min_tokens: OptionalCount = None
    ignore_eos: bool = False
    prompt_logprobs: OptionalCount = None
    response_format: dict = field(default_factory=dict)
    structured_outputs: dict = field(default_factory=dict)
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False

    def __post_init__(self) -> None:
        check_types(self)

    @property
    def options(self) -> StreamOptions:
        """``stream_options``, checked."""
        known = {each.name for each in dataclasses.fields(StreamOptions)}
        return StreamOptions(**{name: bool(value) for name, value in self.stream_options.items() if name in known})

    def sampling_settings(self) -> dict[str, Any]:
        """Return the settings of ``SamplingParams`` that the request sets."""
        settings = {
            own: value for name, own in _SAMPLING.items() if (value := getattr(self, name)) not in (None, [], {})
        }
        if settings.get("top_k") == -1:  # vLLM's name of all tokens
            settings["top_k"] = 0
        return settings


@dataclass(kw_only=True)
class CompletionRequest(Request):
    """``/v1/completions``."""

    prompt: str | list = ""
    echo: bool = False
    logprobs: OptionalCount = None
    max_tokens: OptionalCount = 16
    best_of: OptionalCount = None
    add_special_tokens: bool = True


@dataclass(kw_only=True)
class ChatRequest(Request):
    """``/v1/chat/completions``."""

    messages: list = field(default_factory=list)
    max_completion_tokens: OptionalCount = None
    logprobs: bool = False
    top_logprobs: OptionalCount = None
    tools: list = field(default_factory=list)
    tool_choice: str | dict = "auto"
    parallel_tool_calls: bool = True
    chat_template_kwargs: dict = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    modalities: list = field(default_factory=list)


@dataclass(kw_only=True)
class GenerateRequest:
    """``/inference/v1/generate``: token ids in and out."""

    model: str = ""
    token_ids: list = field(default_factory=list)
    sampling_params: dict = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_types(self)


@dataclass(kw_only=True)
class GenerateSampling(Request):
    """``sampling_params`` of ``/inference/v1/generate``."""

    logprobs: OptionalCount = None
    skip_special_tokens: bool = True  # the answer has ids only


@dataclass(kw_only=True)
class PromptFields:
    """A prompt or messages."""

    model: str = ""
    prompt: str | list | None = None
    messages: list | None = None
    tools: list = field(default_factory=list)
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_types(self)


@dataclass(kw_only=True)
class TokenizeRequest(PromptFields):
    """``/tokenize``."""

    return_token_strs: bool = False


@dataclass(kw_only=True)
class DecisionRequest(PromptFields):
    """``/v1/decisions``: labels, one of which follows the prompt."""

    labels: list = field(default_factory=list)


@dataclass(kw_only=True)
class EmbeddingRequest:
    """``/v1/embeddings``."""

    model: str = ""
    input: str | list = ""
    encoding_format: str = "float"
    dimensions: OptionalCount = None
    pooling: str = ""
    add_special_tokens: bool = True

    def __post_init__(self) -> None:
        check_types(self)


@dataclass(kw_only=True)
class ScoreRequest:
    """``/score``: prompts and their answers, under one of two pairs of names."""

    model: str = ""
    text_1: str | list | None = None
    text_2: str | list | None = None
    queries: str | list | None = None
    documents: str | list | None = None
    use_activation: bool = False

    def __post_init__(self) -> None:
        check_types(self)

    def texts(self) -> tuple[tuple[str, Any], tuple[str, Any]]:
        """Return the names and the values of the prompts and of the answers."""
        for first, second in (("text_1", "text_2"), ("queries", "documents")):
            found = getattr(self, first), getattr(self, second)
            if None not in found:
                return (first, found[0]), (second, found[1])
        raise ApiError(400, "Expected text_1 (prompts) and text_2 (answers), or queries and documents.", "text_1")


@dataclass(kw_only=True)
class ResponseRequest:
    """``/v1/responses``: the fields that are not a chat's."""

    input: str | list = ""
    instructions: str = ""
    max_output_tokens: OptionalCount = None
    text: dict = field(default_factory=dict)
    tools: list = field(default_factory=list)
    tool_choice: str | dict = "auto"
    reasoning: dict = field(default_factory=dict)
    include: list = field(default_factory=list)
    truncation: str = "disabled"
    metadata: dict = field(default_factory=dict)
    user: str = ""

    def __post_init__(self) -> None:
        check_types(self)


@dataclass(kw_only=True)
class DetokenizeRequest:
    """``/detokenize``."""

    model: str = ""
    tokens: list = field(default_factory=list)

    def __post_init__(self) -> None:
        check_types(self)


@dataclass(kw_only=True)
class UnloadAdapterRequest:
    """``/v1/unload_lora_adapter``."""

    lora_name: str = ""

    def __post_init__(self) -> None:
        check_types(self)


@dataclass(kw_only=True)
class LoadAdapterRequest(UnloadAdapterRequest):
    """``/v1/load_lora_adapter``."""

    lora_path: str = ""
    load_inplace: bool = False


def check_object(body: Any) -> Mapping[str, Any]:
    """Return a body, which has to be a JSON object."""
    if not isinstance(body, Mapping):
        raise ApiError(400, f"The body is {type(body).__name__}, expected a JSON object.")
    return body


def parse(kind: type[Kind], body: Any) -> Kind:
    """Return the fields of a request's JSON body.

    Raises:
        ApiError: 400: the body is not an object, a field has the wrong type or range, or is refused.
    """
    body = check_object(body)
    known = {each.name for each in dataclasses.fields(cast(Any, kind))}
    given = {name: value for name, value in body.items() if value is not None}
    for name in _REFUSED:
        nothing = (_WITHOUT_EFFECT[name],) if name in _WITHOUT_EFFECT else (False, [], {}, "")
        if name in given and name not in known and given[name] not in nothing:
            raise ApiError(400, f"{name} is not supported by this server. Omit it.", name, "unsupported_parameter")
    try:
        request = kind(**{name: value for name, value in given.items() if name in known})
    except (WhetError, TypeError) as error:
        message = str(error).partition(": ")[2] or str(error)
        raise ApiError(400, message, message.partition(" ")[0]) from None
    if isinstance(request, Request):
        if request.stream_options and not request.stream:
            raise ApiError(400, "stream_options needs stream: true. Omit it, or set stream.", "stream_options")
        _check_range(request, "n", request.n, 1, MOST_CHOICES)
        _check_range(request, "prompt_logprobs", request.prompt_logprobs or 0, 0, MOST_ALTERNATIVES)
    return request


def _check_range(request: Any, name: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise ApiError(400, f"{name} is {value}, expected an integer from {least} to {most}.", name)


def check_alternatives(name: str, value: int | None) -> int:
    """Return the number of alternatives per token that a field asks for."""
    if (value or 0) > MOST_ALTERNATIVES:
        raise ApiError(400, f"{name} is {value}, expected an integer from 0 to {MOST_ALTERNATIVES}.", name)
    return value or 0
