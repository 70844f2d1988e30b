"""``whet generate``: continues a text on the native engine, and shows it as it comes.

The text goes to standard output, everything about it to standard error. A GGUF file is all that is needed: its own
tokenizer, chat template and end-of-turn tokens are used, without torch and transformers.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import tyro

from whet.config.fields import check_range, check_used
from whet.config.sampling import Completion, SamplingParams
from whet.data.rows import tokenize_prompt
from whet.engine import Engine
from whet.engine.session import Token
from whet.errors import WhetError, WhetValueError
from whet.models import tokenizers
from whet.models.formats import Weights
from whet.models.sources.gguf_container import GGUFFile, read_gguf
from whet.models.sources.mapped import map_file, parse_json
from whet.models.sources.pretrained import open_pretrained


@dataclasses.dataclass(frozen=True)
class GenerateConfig:
    """Continues a prompt; of a model with a chat template, as its assistant."""

    model: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODEL")]
    """A folder that save_pretrained wrote, or a .gguf file; of one in parts any of them."""
    prompt: str
    """The text."""
    n: Annotated[int, tyro.conf.arg(aliases=["-n"])] = 1
    """Number of continuations. One is streamed, several are shown when all are done."""
    max_new_tokens: int = 256
    """Longest continuation in tokens."""
    min_new_tokens: int = 0
    """Tokens before which it does not end."""
    stop: Sequence[str] = ()
    """Texts that end it, and are not shown."""
    temperature: float = 1.0
    """Divides the logits; 0: always the most probable token."""
    top_k: int = 0
    """Sample from the k most probable tokens; 0: from all."""
    top_p: float = 1.0
    """Sample from the most probable tokens that together have this mass; 1: from all."""
    min_p: float = 0.0
    """Drop tokens less probable than this share of the most probable one; 0: none."""
    repetition_penalty: float = 1.0
    """Makes tokens that are there already, in prompt or continuation, less probable; 1: does not."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens that the continuation has; -2 to 2."""
    frequency_penalty: float = 0.0
    """The same for each time that it has them; -2 to 2."""
    logit_bias: Annotated[Mapping[int, float], tyro.conf.arg(metavar="[TOKEN BIAS [TOKEN BIAS ...]]")] = (
        dataclasses.field(default_factory=dict)
    )
    """Added to the logits of tokens, by id; -100 to 100."""
    seed: int = 0
    """Keys the sampling: the same seed, the same text."""
    top_logprobs: int = 0
    """List every token with its log-probability and so many of the most probable ones, on standard error; to 20."""
    weights: Weights | None = None
    """Format of the matrices; none: bf16 of a folder, and of a GGUF file its own."""
    adapter: str = ""
    """A folder of LoRA adapters that PEFT or whet train saved, for this model."""
    tokenizer: str = ""
    """A folder with the tokenizer, or a .gguf file that has it; empty: the model's."""
    raw: bool = False
    """Continue the prompt as it stands, though there is a chat template."""


def main(argv: Sequence[str]) -> int:
    """Writes the continuations; the exit status is 0."""
    asked = tyro.cli(GenerateConfig, args=argv, prog="whet generate")
    _check(asked)  # what is wrong is said before anything is loaded
    model = find_model(asked.model)
    tokenizer = load_tokenizer(asked.tokenizer or model)
    prompt = asked.prompt
    if tokenizer.chat_template and not asked.raw:
        prompt = [{"role": "user", "content": asked.prompt}]
    prompt_ids = tokenize_prompt({"prompt": prompt}, tokenizer)
    engine = load_engine(model, asked.weights, len(prompt_ids) + asked.max_new_tokens)
    engine.tokenizer = tokenizer
    stops = stop_ids(asked.model, tokenizer, engine.config.vocab_size)
    sampling = SamplingParams.of(asked, stop_token_ids=stops)
    adapter = engine.add_adapter(asked.adapter) if asked.adapter else None
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


def _check(asked: GenerateConfig) -> None:
    check_range(asked, "n", asked.n >= 1, "an integer >= 1")
    SamplingParams.of(asked, stop_token_ids=())
    always = "temperature is 0, which takes the most probable token always"
    check_used(asked, ["n", "top_k", "top_p", "min_p"], asked.temperature > 0, always)


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


def text_pieces(tokenizer: Any, token_ids: Iterable[int]) -> Iterator[str]:
    """The text of tokens, piece by piece, which together are the text of them all.

    A character whose bytes lie in several tokens comes with the last of them. Tokens are decoded with those of the
    piece before, because what a token says (a blank in front, say) may hang on what it follows.
    """
    ids: list[int] = []
    begin = shown = 0  # ids[begin:shown] is the piece before

    def text(part: list[int]) -> str:
        return tokenizer.decode(part, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def rest() -> str:
        return text(ids[begin:])[len(text(ids[begin:shown])) :]

    for token_id in token_ids:
        ids.append(token_id)
        piece = rest()
        if piece and not piece.endswith("\ufffd"):
            yield piece
            begin, shown = shown, len(ids)
    if piece := rest():
        yield piece


def find_model(path: str) -> str | GGUFFile:
    """A folder as it is called; a GGUF file with what its head says, which engine and tokenizer share.

    Raises:
        WhetValueError: there is neither, or the file is damaged.
    """
    if not Path(path).exists():
        raise WhetValueError(f"whet generate: there is no {path!r}. Pass a model's folder or its .gguf file.")
    return path if Path(path).is_dir() else read_gguf(Path(path), f"whet generate: {path}")


def load_engine(model: str | GGUFFile, weights: str | None, n_tokens: int) -> Engine:
    """The engine of a model, for a sequence of up to ``n_tokens``.

    Frequencies that depend on the length (longrope) are those for so many tokens, as in transformers.

    Raises:
        WhetValueError: the engine does not run it.
    """
    source = open_pretrained(model)
    if source.short_position is not None and n_tokens <= source.short_position:
        source = open_pretrained(model, max_position=source.short_position)
    return Engine(source, weights=weights, where="whet generate")


def load_tokenizer(model: str | GGUFFile) -> Any:
    """The tokenizer of a folder or of a GGUF file.

    Raises:
        WhetValueError: there is none, or it cannot be read.
        MissingExtraError: of a folder, and transformers is not installed.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        return tokenizers.load_tokenizer(model, "whet generate")
    except WhetValueError as error:
        raise WhetValueError(f"{error} Or pass --tokenizer with another.") from error


def stop_ids(model: str, tokenizer: Any, vocab_size: int) -> list[int]:
    """Tokens that end a text: those of a GGUF file's tokenizer, or EOS, and those of the folder's generation config.

    Raises:
        WhetValueError: one of them is outside the model's vocabulary.
    """
    found = set(getattr(tokenizer, "stop_token_ids", [tokenizer.eos_token_id]))
    for name in ("generation_config.json", "config.json"):
        path = Path(model) / name
        if path.is_file():
            try:
                eos = parse_json(map_file(path, model).tobytes(), name).get("eos_token_id")
            except WhetError:
                continue  # only the config is needed, and the engine has read that
            found.update(eos if isinstance(eos, list) else [eos])
            break
    stops = sorted(i for i in found if isinstance(i, int))
    for token in stops:
        if not 0 <= token < vocab_size:
            raise WhetValueError(
                f"whet generate: EOS is token {token} by the tokenizer or {name}, outside the model's vocabulary of "
                f"{vocab_size} tokens. Pass --tokenizer with the model's own, or fix {name}."
            )
    return stops
