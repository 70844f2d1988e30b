"""The choices of a response: text, tokens and log-probs of each sample, as they are sampled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from whet.engine.session import Drawn
from whet.models.tokenizers.token_texts import TextStream
from whet.serve.model import ServedModel

Alternatives = Sequence[tuple[int, float]]


class Choice:
    """One sample of a request.

    Args:
        model: the served model.
        index: number of the choice.
        stop_ids: tokens that end it, whose text is not part of its text.
        shown: special token -> its text; others have none.

    Attributes:
        token_ids: the tokens so far.
        logprobs: of each token.
        alternatives: the most probable tokens at the place of each token; empty if not requested.
        finish: "stop", "length", or "abort" by a pause; "": it continues.
    """

    def __init__(
        self, model: ServedModel, index: int, stop_ids: Sequence[int] = (), shown: Mapping[int, str] | None = None
    ) -> None:
        self.index, self._stop_ids, self._shown = index, frozenset(stop_ids), shown or {}
        self._text = TextStream(model.texts)
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.alternatives: list[Alternatives] = []
        self.finish = ""

    def add(self, drawn: Drawn) -> str:
        """Add the newest tokens, and return the text that became final."""
        ids = drawn.token_ids.tolist()
        has_stops = len(drawn.n_withheld) > 0
        is_done = drawn.finish != "running"
        texts = []
        for i, token_id in enumerate(ids):
            is_last = is_done and i == len(ids) - 1
            if is_last and drawn.finish == "stop" and token_id in self._stop_ids:
                texts.append(self._text.end())
            elif token_id in self._shown:
                texts.append(self._text.end() + self._shown[token_id])
            else:
                texts.append(self._text.add(token_id, int(drawn.n_withheld[i]) if has_stops else 0, is_last))
        self.token_ids += ids
        self.logprobs += drawn.logprobs.tolist()
        self.alternatives += drawn.alternatives()
        if is_done:
            self.finish = drawn.finish
            if not ids:
                texts.append(self._text.end())
        return "".join(texts)


def chat_logprobs(
    model: ServedModel,
    token_ids: Sequence[int],
    logprobs: Sequence[float],
    alternatives: Sequence[Alternatives],
    as_ids: bool,
) -> dict[str, Any]:
    """Return log-probs in the form of chat completions."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        text = f"token_id:{token_id}" if as_ids else model.token_texts[token_id]
        return {"token": text, "logprob": logprob, "bytes": list(model.token_bytes[token_id])}

    rows = alternatives or [()] * len(token_ids)
    return {
        "content": [
            {**entry(token_id, logprob), "top_logprobs": [entry(*pair) for pair in pairs]}
            for token_id, logprob, pairs in zip(token_ids, logprobs, rows, strict=True)
        ]
    }


class LegacyLogprobs:
    """Log-probs in the form of ``/v1/completions``, whose offsets continue from part to part.

    Args:
        model: the served model.
        as_ids: write tokens as ``token_id:ID``.
    """

    def __init__(self, model: ServedModel, as_ids: bool) -> None:
        self._model, self._as_ids, self._offset = model, as_ids, 0

    def part(
        self, token_ids: Sequence[int], logprobs: Sequence[float | None], alternatives: Sequence[Alternatives]
    ) -> dict[str, Any]:
        """Return the lists of the next tokens; the log-prob of a prompt's first token is None."""
        key_of = "token_id:{}".format if self._as_ids else self._model.token_keys.__getitem__
        keys, texts = list(map(key_of, token_ids)), self._model.token_texts
        rows = alternatives or [()] * len(token_ids)
        *offsets, self._offset = accumulate((len(texts[i]) for i in token_ids), initial=self._offset)
        tops: list[dict[str, float] | None] = []
        for key, logprob, pairs in zip(keys, logprobs, rows, strict=True):
            top = {key_of(other): value for other, value in pairs}
            if logprob is not None:
                top[key] = logprob  # the same number in both places
            tops.append(None if logprob is None else top)
        return {"tokens": keys, "token_logprobs": list(logprobs), "top_logprobs": tops, "text_offset": offsets}


def prompt_logprobs(
    model: ServedModel, token_ids: Sequence[int], logprobs: Sequence[float | None], alternatives: Sequence[Alternatives]
) -> list[dict[str, Any] | None]:
    """Return log-probs of a prompt in vLLM's form: per token, id -> its text and log-prob; None for the first."""
    found: list[dict[str, Any] | None] = []
    rows = alternatives or [()] * len(token_ids)
    for token_id, logprob, pairs in zip(token_ids, logprobs, rows, strict=True):
        if logprob is None:
            found.append(None)
            continue
        values = {**dict(pairs), token_id: logprob}
        found.append({str(i): {"logprob": value, "decoded_token": model.token_texts[i]} for i, value in values.items()})
    return found


def usage_of(n_prompt: int, n_completion: int, n_cached: int) -> dict[str, Any]:
    """Return the token counts of a response."""
    return {
        "prompt_tokens": n_prompt,
        "completion_tokens": n_completion,
        "total_tokens": n_prompt + n_completion,
        "prompt_tokens_details": {"cached_tokens": n_cached},
    }
