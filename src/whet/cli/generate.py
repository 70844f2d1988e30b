"""``whet generate``: generates text on the native engine and streams it.

The text is printed to standard output, everything else to standard error.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import tyro

from whet.cli.settings import parse_flags
from whet.cli.text_options import OneModelConfig
from whet.config.fields import Positive, reject_ineffective
from whet.config.grammars import GrammarText, parse_schema
from whet.config.sampling import Completion, SamplingParams
from whet.data.rows import tokenize_prompt
from whet.data.thinking import Replies
from whet.engine import Engine
from whet.engine.session import Token
from whet.text.checkpoint_model import resolve_adapter
from whet.text.model import detokenise_stream, find_model, find_stop_ids, load_chat_tokenizer, load_engine

_WHERE = "whet generate"


@dataclasses.dataclass(kw_only=True)
class GenerateConfig(OneModelConfig):
    """Continue a prompt, or answer it if the model has a chat template."""

    prompt: str
    """The prompt."""
    n: Annotated[Positive, tyro.conf.arg(aliases=["-n"])] = 1
    """Number of completions. A single one is streamed; several are printed when all are done."""
    top_logprobs: int = 0
    """List every token with its log-prob and this many most probable alternatives, on standard error; at most 20."""
    raw: bool = False
    """Continue the prompt as plain text, without the chat template."""
    schema: GrammarText = ""
    """A JSON schema that the completion follows: its text, or a file. Needs the extra serve, as does --regex."""
    regex: str = ""
    """A regular expression that matches the completion."""

    def sampling(self, stop_token_ids: Sequence[int] = ()) -> SamplingParams:
        schema = parse_schema(self.schema, _WHERE)
        return SamplingParams.from_settings(self, stop_token_ids=stop_token_ids, schema=schema)

    def check(self) -> None:
        super().check()
        reject_ineffective(self, ["chat_template"], not self.raw, "raw continues the prompt without a chat template")

    def unused_if_greedy(self) -> list[str]:
        return [*super().unused_if_greedy(), "n"]


def main(argv: Sequence[str]) -> int:
    """Print the completions and return 0."""
    options = parse_flags(GenerateConfig, argv, _WHERE)
    options.check()
    path, adapter_path = resolve_adapter(options.model, options.adapter, _WHERE)
    model = find_model(path, _WHERE)
    tokenizer = load_chat_tokenizer(model, _WHERE, options.chat_template, adapter_path, options.tokenizer)
    prompt = options.prompt
    if tokenizer.chat_template and not options.raw:
        prompt = [{"role": "user", "content": options.prompt}]
    prompt_ids = tokenize_prompt({"prompt": prompt}, tokenizer)
    n_tokens = len(prompt_ids) + options.max_new_tokens
    engine = load_engine(
        model, options.weights, n_tokens, _WHERE, adapter_path, kv_dtype=options.kv_dtype,
        expert_bytes=options.expert_bytes, draft=options.draft, device=options.device,
    )  # fmt: skip
    engine.tokenizer = tokenizer
    sampling = options.sampling(find_stop_ids(path, tokenizer, engine.config.vocab_size, _WHERE))
    if sampling.grammar_settings():
        sampling = dataclasses.replace(sampling, grammar_after=Replies(tokenizer).closing_tag(prompt_ids))
    adapter = engine.add_adapter(adapter_path) if adapter_path else None
    with engine:
        start_s = time.perf_counter()
        if options.n == 1:
            tokens, reason = _stream(engine, tokenizer, prompt_ids, sampling, adapter)
            n_tokens = len(tokens)
            _list_alternatives(tokenizer, tokens)
        else:
            [samples] = engine.generate([prompt_ids], options.n, sampling, adapter=adapter)
            for i, sample in enumerate(samples, start=1):
                print(f"--- {i}/{options.n} ({sample.finish_reason})")
                print("".join(detokenise_stream(tokenizer, sample.token_ids)) if sample.text is None else sample.text)
                _list_alternatives(tokenizer, _list_tokens(sample))
            n_tokens, reason = sum(len(sample.token_ids) for sample in samples), f"{options.n} samples"
        elapsed_s = time.perf_counter() - start_s
    sys.stdout.flush()
    print(
        f"{len(prompt_ids)} + {n_tokens} tokens in {elapsed_s:.2f} s, {n_tokens / elapsed_s:.1f} tokens/s ({reason})",
        file=sys.stderr,
    )
    return 0


def _stream(
    engine: Engine, tokenizer: Any, prompt_ids: list[int], sampling: SamplingParams, adapter: int | None
) -> tuple[list[Token], str]:
    """Print one completion as it is sampled; return its tokens and finish reason."""
    sampled: list[Token] = []
    with engine.stream(prompt_ids, sampling, adapter=adapter) as stream:

        def tokens() -> Iterator[Token]:
            for token in stream:
                sampled.append(token)
                yield token

        if sampling.stop:
            texts = (token.text or "" for token in tokens())
        else:
            texts = detokenise_stream(tokenizer, (token.token_id for token in tokens()))
        try:
            for text in texts:
                print(text, end="", flush=True)
        finally:
            print(flush=True)  # also after Ctrl-C, so that later output starts on a new line
        return sampled, stream.finish_reason


def _list_tokens(sample: Completion) -> list[Token]:
    tops = sample.top_logprobs or [None] * len(sample.token_ids)
    return [Token(*row) for row in zip(sample.token_ids, sample.logprobs or [], [None] * len(tops), tops, strict=True)]


def _list_alternatives(tokenizer: Any, tokens: Sequence[Token]) -> None:
    """Print a line per token with its most probable alternatives, if requested."""

    def describe(token_id: int, logprob: float) -> str:
        return f"{tokenizer.decode([token_id])!r} {logprob:.3f}"

    for token in tokens:
        if token.top_logprobs is not None:
            others = ", ".join(describe(*pair) for pair in token.top_logprobs)
            print(f"{describe(token.token_id, token.logprob)}: {others}", file=sys.stderr)
