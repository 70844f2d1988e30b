"""A service whose requests belong to sessions, named by their API keys, which record what is sampled."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from functools import partial
from typing import Any

from whet.config.sampling import SamplingParams
from whet.engine.grammar import Constraint
from whet.engine.session import Call
from whet.errors import WhetError
from whet.serve.choices import Choice
from whet.serve.errors import GONE, ApiError
from whet.serve.inputs import plain_messages
from whet.serve.limits import Limits, key_of_request
from whet.serve.loop import EngineLoop
from whet.serve.metrics import Metrics
from whet.serve.model import ServedModel
from whet.serve.schema import Request
from whet.serve.service import Part, Prompt, Service
from whet.serve.sessions import Rendered, Session, Turn
from whet.text.replies import as_message
from whet.text.seams import Seams

_LEFT = "the client went away during a request"


class RecordingService(Service):
    """Requests of sessions.

    Args:
        model: its defaults are the settings of the run.
        loop: steps the model's engine.
        metrics: counts completed requests.
        limits: of open requests.
        sessions: by API key.
    """

    def __init__(
        self, model: ServedModel, loop: EngineLoop, metrics: Metrics, limits: Limits, sessions: Mapping[str, Session]
    ) -> None:
        super().__init__(model, loop, metrics, limits)
        self._sessions = {hashlib.sha256(key.encode()).hexdigest(): session for key, session in sessions.items()}

    def _session(self) -> Session:
        return self._sessions[key_of_request.get()]

    @contextmanager
    def handling(self) -> Iterator[None]:
        session = self._session()
        session.n_handled += 1
        try:
            yield
        except (ApiError, asyncio.CancelledError) as error:
            if not isinstance(error, ApiError) or error.status == GONE:
                session.error = session.error or _LEFT
            raise
        finally:
            session.n_handled -= 1

    def render(self, messages: list, request: Any, tools: list) -> list[int]:
        ids = super().render(messages, request, tools)
        plain = [
            {name: value for name, value in message.items() if value is not None}
            for message in plain_messages(messages)
        ]
        if request.continue_final_message or not request.add_generation_prompt or plain[-1]["role"] == "assistant":
            return ids
        row = {"chat_template_kwargs": request.chat_template_kwargs, **({"tools": tools} if tools else {})}
        seams = Seams(self.model.tokenizer, self.model.stop_ids, row, "a session")
        try:
            return self._session().render(Rendered(plain, row), ids, seams, partial(reply_of, self.model))
        except WhetError as error:
            raise ApiError(400, str(error), "messages") from None

    def check_length(self, n_prompt: int, n_new: int) -> None:
        try:
            super().check_length(n_prompt, n_new)
        except ApiError:
            self._session().refuse("context")
            raise

    def sampling_of(self, request: Request, max_new_tokens: int, n_alternatives: int) -> SamplingParams:
        if request.seed is not None:
            raise ApiError(400, f"seed is {request.seed}, and the run chooses the seeds. Omit it.", "seed")
        return super().sampling_of(request, max_new_tokens, n_alternatives)

    async def run(
        self,
        prompts: Sequence[Prompt],
        sampling: Sequence[SamplingParams | None],
        *,
        n: int,
        shown: Mapping[int, str] | None = None,
        constrain: Callable[[], Constraint] | None = None,
        **options: Any,
    ) -> AsyncGenerator[Part]:
        if len(prompts) != 1 or n != 1 or sampling[0] is None or constrain is not None:
            raise ApiError(400, "A request of a session samples one choice of one prompt, without a grammar.")
        session, engine = self._session(), self.model.engine
        turn = session.begin(prompts[0].token_ids, sampling[0])

        def record(call: Call) -> None:
            [completion] = engine.completions(call, 1, turn.sampling)
            text = Choice(self.model, 0, turn.sampling.stop_token_ids, shown).add(call.drawn(0, 0))
            session.end(turn, completion, text)

        options |= {"n": n, "shown": shown, "key": session.key, "ended": record}
        try:
            async with aclosing(super().run(prompts, [turn.sampling], **options)) as parts:
                async for part in parts:
                    yield part
        except (GeneratorExit, asyncio.CancelledError):
            session.drop(turn, _LEFT)
            raise
        except BaseException:
            session.drop(turn)
            raise


def reply_of(model: ServedModel, turn: Turn) -> dict[str, Any]:
    """Return the message that the client got for a turn."""
    if turn.reply is None:
        tools = turn.chat.row.get("tools", []) if turn.chat else []
        turn.reply = as_message(model.replies.parser(turn.prompt_ids, tools).add(turn.text, is_last=True))
    return turn.reply
