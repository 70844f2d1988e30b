"""``whet generate``: continues a text on the native engine, and shows it as it comes.

The text goes to standard output, everything about it to standard error.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import tyro

from whet.cli.settings import parse_flags
from whet.cli.text_model import (
    OneModelConfig,
    find_model,
    load_chat_tokenizer,
    load_engine,
    stop_ids,
    text_pieces,
    with_adapters,
)
from whet.config.fields import check_range, reject_ineffective
from whet.config.sampling import Completion, SamplingParams
from whet.data.rows import tokenize_prompt
from whet.engine import Engine
from whet.engine.session import Token

_WHERE = "whet generate"


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateConfig(OneModelConfig):
    """Continues a prompt; of a model with a chat template, as its assistant."""

    prompt: str
    """The text."""
    n: Annotated[int, tyro.conf.arg(aliases=["-n"])] = 1
    """Number of continuations. One is streamed, several are shown when all are done."""
    top_logprobs: int = 0
    """List every token with its log-probability and so many of the most probable ones, on standard error; to 20."""
    raw: bool = False
    """Continue the prompt as it stands, though there is a chat template."""

    def check(self) -> None:
        check_range(self, "n", self.n >= 1, "an integer >= 1")
        super().check()
        reject_ineffective(self, ["chat_template"], not self.raw, "raw continues the prompt without one")

    def unused_if_greedy(self) -> list[str]:
        return [*super().unused_if_greedy(), "n"]


def main(argv: Sequence[str]) -> int:
    """Writes the continuations; the exit status is 0."""
    asked = parse_flags(GenerateConfig, argv, _WHERE)
    asked.check()
    path, adapter_path = with_adapters(asked.model, asked.adapter, _WHERE)
    model = find_model(path, _WHERE)
    tokenizer = load_chat_tokenizer(asked.tokenizer or model, _WHERE, asked.chat_template)
    prompt = asked.prompt
    if tokenizer.chat_template and not asked.raw:
        prompt = [{"role": "user", "content": asked.prompt}]
    prompt_ids = tokenize_prompt({"prompt": prompt}, tokenizer)
    engine = load_engine(model, asked.weights, len(prompt_ids) + asked.max_new_tokens, _WHERE, adapter_path)
    engine.tokenizer = tokenizer
    sampling = asked.sampling(stop_ids(path, tokenizer, engine.config.vocab_size, _WHERE))
    adapter = engine.add_adapter(adapter_path) if adapter_path else None
    with engine:
        start_s = time.perf_counter()
        if asked.n == 1:
            tokens, reason = _stream(engine, tokenizer, prompt_ids, sampling, adapter)
            n_tokens = len(tokens)
            _list_alternatives(tokenizer, tokens)
        else:
            [samples] = engine.generate([prompt_ids], asked.n, sampling, adapter=adapter)
            for i, sample in enumerate(samples, start=1):
                print(f"--- {i}/{asked.n} ({sample.finish_reason})")
                print("".join(text_pieces(tokenizer, sample.token_ids)) if sample.text is None else sample.text)
                _list_alternatives(tokenizer, _tokens_of(sample))
            n_tokens, reason = sum(len(sample.token_ids) for sample in samples), f"{asked.n} samples"
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
    """Shows one continuation as it comes; its tokens, and why it ended."""
    taken: list[Token] = []
    with engine.stream(prompt_ids, sampling, adapter=adapter) as stream:

        def tokens() -> Iterator[Token]:
            for token in stream:
                taken.append(token)
                yield token

        if sampling.stop:
            pieces = (token.text or "" for token in tokens())
        else:
            pieces = text_pieces(tokenizer, (token.token_id for token in tokens()))
        try:
            for piece in pieces:
                print(piece, end="", flush=True)
        finally:
            print(flush=True)  # also where Ctrl-C ends it, so that what follows has a line of its own
        return taken, stream.finish_reason


def _tokens_of(sample: Completion) -> list[Token]:
    tops = sample.top_logprobs or [None] * len(sample.token_ids)
    return [Token(*of) for of in zip(sample.token_ids, sample.logprobs or [], [None] * len(tops), tops, strict=True)]


def _list_alternatives(tokenizer: Any, tokens: Sequence[Token]) -> None:
    """A line for each token: itself, and the most probable ones, where these were asked for."""

    def describe(token_id: int, logprob: float) -> str:
        return f"{tokenizer.decode([token_id])!r} {logprob:.3f}"

    for token in tokens:
        if token.top_logprobs is not None:
            others = ", ".join(describe(*pair) for pair in token.top_logprobs)
            print(f"{describe(token.token_id, token.logprob)}: {others}", file=sys.stderr)
