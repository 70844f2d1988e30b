"""Endpoints that compute without sampling: embeddings, rewards, and the probabilities of labels."""

from __future__ import annotations

import asyncio
import base64
import secrets
import time
from typing import Any

import numpy as np

from whet.data.messages import is_messages
from whet.errors import WhetError
from whet.serve.endpoints import Body, Endpoint
from whet.serve.errors import ApiError
from whet.serve.inputs import read_prompt, read_texts
from whet.serve.schema import (
    MOST_LABELS,
    MOST_PROMPTS,
    DecisionRequest,
    EmbeddingRequest,
    ScoreRequest,
    check_object,
    parse,
)
from whet.serve.service import Service
from whet.text.reward_model import tokenize_answer


class Embeddings(Endpoint):
    """``/v1/embeddings``: pooled hidden states of length 1, as Qwen3-Embedding's are used."""

    def __init__(self, service: Service, body: Any) -> None:
        self._service, self._served = service, service.model
        self._request = request = parse(EmbeddingRequest, body)
        self._served.adapter_of(request.model)
        dim = self._served.engine.config.hidden_dim
        self._pooling: Any = request.pooling or self._served.pooling
        if self._pooling not in ("last", "mean"):
            raise ApiError(400, f"pooling is {self._pooling!r:.40}, expected last or mean.", "pooling")
        if request.encoding_format not in ("float", "base64"):
            got = f"encoding_format is {request.encoding_format!r:.40}"
            raise ApiError(400, f"{got}, expected float or base64.", "encoding_format")
        if request.dimensions is not None and not 1 <= request.dimensions <= dim:
            raise ApiError(400, f"dimensions is {request.dimensions}, expected from 1 to {dim}.", "dimensions")
        self._rows = [ids for ids, _ in read_texts(self._served, request.input, "input", request.add_special_tokens)]
        for ids in self._rows:
            service.check_length(len(ids), 0)

    async def respond(self) -> Body:
        engine, request = self._served.engine, self._request
        scores = await self._service.score(engine.open_embed, request.model, self._rows, pooling=self._pooling)
        found = await asyncio.to_thread(lambda: [self._encode(engine.pool(each.hidden)) for each in scores])
        n_tokens = sum(map(len, self._rows))
        return {
            "id": f"embd-{secrets.token_hex(12)}",
            "object": "list",
            "created": int(time.time()),
            "model": request.model or self._served.name,
            "data": [{"object": "embedding", "index": i, "embedding": each} for i, each in enumerate(found)],
            "usage": {"prompt_tokens": n_tokens, "total_tokens": n_tokens},
        }

    def _encode(self, embedding: np.ndarray) -> list[float] | str:
        """Cut and normalise an embedding."""
        kept = embedding[: self._request.dimensions].astype(np.float64)
        length = np.linalg.norm(kept)
        unit = (kept / length if length else kept).astype("<f4")
        return unit.tolist() if self._request.encoding_format == "float" else base64.b64encode(unit.tobytes()).decode()


class Rewards(Endpoint):
    """``/score``, as vLLM's: scores of a reward model for prompts with an answer each, or for answers to one prompt."""

    def __init__(self, service: Service, body: Any) -> None:
        self._service, self._served = service, service.model
        self._request = request = parse(ScoreRequest, body)
        name = request.model or self._served.name
        self._served.adapter_of(name)
        if name not in self._served.heads:
            known = ", ".join(self._served.heads) or "none"
            raise ApiError(400, f"The model {name!r} is not a reward model. Reward models: {known}.", "model")
        self._head = self._served.heads[name]
        (first, given), (second, answers) = request.texts()
        several = isinstance(given, list) and not is_messages(given)
        prompts, answers = given if several else [given], answers if isinstance(answers, list) else [answers]
        prompts = prompts * len(answers) if len(prompts) == 1 else prompts
        if len(prompts) != len(answers) or not 1 <= len(answers) <= MOST_PROMPTS:
            raise ApiError(
                400, f"{first} has {len(prompts)} entries and {second} {len(answers)}, expected as many, or one, "
                f"and at most {MOST_PROMPTS}.", first
            )  # fmt: skip
        self._rows = [self._read(*pair) for pair in zip(prompts, answers, strict=True)]
        for ids in self._rows:
            service.check_length(len(ids), 0)

    def _read(self, prompt: Any, answer: Any) -> list[int]:
        texts = [message.get("content") for message in prompt] if is_messages(prompt) else [prompt]
        if not all(isinstance(text, str) for text in (*texts, answer)):
            raise ApiError(
                400, f"A prompt is {prompt!r:.60} with the answer {answer!r:.60}, expected texts, or messages."
            )
        self._served.check_text(*texts, answer)
        try:
            return list(self._head.inputs(tokenize_answer(prompt, answer, self._served.tokenizer)))
        except WhetError as error:
            raise ApiError(400, str(error).partition(": ")[2]) from None

    async def respond(self) -> Body:
        engine, request = self._served.engine, self._request
        found = await self._service.score(engine.open_embed, request.model, self._rows, pooling="last")
        scores = self._head.scores(np.stack([engine.pool(each.hidden) for each in found]))
        if request.use_activation:
            scores = np.exp(-np.logaddexp(0, -scores))
        n_tokens = sum(map(len, self._rows))
        return {
            "id": f"score-{secrets.token_hex(12)}",
            "object": "list",
            "created": int(time.time()),
            "model": request.model or self._served.name,
            "data": [{"index": i, "object": "score", "score": score} for i, score in enumerate(scores.tolist())],
            "usage": {"prompt_tokens": n_tokens, "total_tokens": n_tokens},
        }


class Decisions(Endpoint):
    """``/v1/decisions``: the probability of each label after a prompt, which is computed once."""

    def __init__(self, service: Service, body: Any) -> None:
        self._service, self._served = service, service.model
        for name in ("questions", "input"):
            if name in check_object(body):
                raise ApiError(400, f"{name} is not supported. Send a prompt or messages, and labels.", name)
        self._request = request = parse(DecisionRequest, body)
        self._served.check_writes(request.model)
        if not 2 <= len(request.labels) <= MOST_LABELS:
            got = f"labels has {len(request.labels)} entries"
            raise ApiError(400, f"{got}, expected from 2 to {MOST_LABELS}.", "labels")
        self._prompt = read_prompt(self._served, request)
        if not self._prompt:
            raise ApiError(400, "prompt is empty, expected at least one token.", "prompt")
        self._labels = [ids for ids, _ in read_texts(self._served, request.labels, "labels", special=False)]
        for ids in self._labels:
            service.check_length(len(self._prompt), len(ids))

    async def respond(self) -> Body:
        request, n_prompt = self._request, len(self._prompt)
        rows = [[*self._prompt, *ids] for ids in self._labels]
        scores = await self._service.score(
            self._served.engine.open_score, request.model, rows, start=n_prompt, keep=True
        )
        logprobs = np.array([each.logprobs.sum(dtype=np.float64) for each in scores])
        weights = np.exp(logprobs - logprobs.max())
        probabilities = (weights / weights.sum()).tolist()
        return {
            "id": f"decision-{secrets.token_hex(12)}",
            "object": "decision",
            "created": int(time.time()),
            "model": request.model or self._served.name,
            "system_fingerprint": self._served.fingerprint,
            "choice": request.labels[int(logprobs.argmax())],
            "labels": [
                {"label": label, "logprob": logprob, "probability": probability, "n_tokens": len(ids)}
                for label, logprob, probability, ids in zip(
                    request.labels, logprobs.tolist(), probabilities, self._labels, strict=True
                )
            ],
            "usage": {"prompt_tokens": n_prompt, "total_tokens": n_prompt + sum(map(len, self._labels))},
        }
