"""The native engine: batched sampling and scoring on the kernels, for models described by data."""

from __future__ import annotations

from whet.engine.architecture import ModelConfig
from whet.engine.engine import Engine
from whet.engine.session import EngineBusyError, Token, TokenStream

__all__ = ["Engine", "EngineBusyError", "ModelConfig", "Token", "TokenStream"]
