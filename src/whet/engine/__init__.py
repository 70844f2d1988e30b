"""The native engine: batched sampling and scoring, for models described by data."""

from __future__ import annotations

from whet.engine.engine import Engine
from whet.engine.session import EngineBusyError, Token, TokenStream
from whet.models.architecture import ModelConfig

__all__ = ["Engine", "EngineBusyError", "ModelConfig", "Token", "TokenStream"]
