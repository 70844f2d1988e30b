"""An HTTP server of one model with the interface of OpenAI and of vLLM: ``whet serve``, or ``make_app`` in ASGI."""

from __future__ import annotations

from whet.serve.app import make_app
from whet.serve.loading import LoadingApp
from whet.serve.model import ServedModel

__all__ = ["LoadingApp", "ServedModel", "make_app"]
