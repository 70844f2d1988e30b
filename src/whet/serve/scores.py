"""Endpoints that compute without sampling: embeddings, and the probabilities of labels."""

from __future__ import annotations

import asyncio
import base64
import secrets
import time
from typing import Any

import numpy as np

from whet.serve.endpoints import Body, Endpoint
from whet.serve.errors import ApiError
from whet.serve.inputs import read_prompt, read_texts
from whet.serve.schema import MOST_LABELS, DecisionRequest, EmbeddingRequest, check_object, parse
from whet.serve.service import Service


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


class Decisions(Endpoint):
    """``/v1/decisions``: the probability of each label after a prompt, which is computed once."""

    def __init__(self, service: Service, body: Any) -> None:
        self._service, self._served = service, service.model
        for name in ("questions", "input"):
            if name in check_object(body):
                raise ApiError(400, f"{name} is not supported. Send a prompt or messages, and labels.", name)
        self._request = request = parse(DecisionRequest, body)
        self._served.adapter_of(request.model)
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
