"""Agents that talk to an OpenAI URL: episodes of what they sampled, independent of time, and agents that fail."""

from __future__ import annotations

import asyncio
import os
import random
import re
import socket
import time
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from tests.cli.conftest import ROOT, write_tiny_model
from tests.raising import assert_mentions, assert_raises
from tests.rollout.test_episodes import EOS, TEMPLATE

from whet.config.sampling import SamplingParams
from whet.data.chat import Chat
from whet.engine import Engine
from whet.engine.session import Call
from whet.models.tokenizers import load_tokenizer
from whet.rollout.episodes import Episode, EpisodeLimits, rollout_of
from whet.serve.agents import AgentPlayer, Server

SAMPLING = SamplingParams(max_new_tokens=60, stop_token_ids=(EOS,), temperature=0.8, top_k=40, kept_tokens=True, seed=4)
LIMITS = EpisodeLimits(max_turns=4, max_turn_tokens=10, timeout_s=30.0)
ROWS = [{"name": "a"}, {"name": "b"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Any:
    return write_tiny_model(tmp_path_factory.mktemp("model"), TEMPLATE)


@pytest.fixture(scope="module")
def tokenizer(folder: Any) -> Any:
    return load_tokenizer(str(folder))


@pytest.fixture(scope="module")
def engine(folder: Any) -> Any:
    with Engine.from_pretrained(folder) as engine:
        yield engine


def play(engine: Any, tokenizer: Any, agent: Any, n: int = 2, rows: Any = ROWS, **limits: Any) -> list[Episode]:
    limits = {**LIMITS.__dict__, **limits}
    return AgentPlayer(agent, tokenizer, [EOS], EpisodeLimits(**limits)).play(engine, rows, n, SAMPLING)


def facts(episode: Episode) -> Any:
    branches = [*((b.prompt_ids, b.completion) for b in episode.earlier), (episode.prompt_ids, episode.completion())]
    found = [(ids, each.token_ids, each.sampled, each.logprobs) for ids, each in branches]
    written = [(message["role"], message["content"]) for message in episode.messages]
    return found, written, episode.rewards, episode.end


async def talk(row: Any, server: Server, *, turns: int = 3, slow: float = 0.0, **options: Any) -> float:
    """A conversation: the reward is the number of letters that the policy wrote."""
    letters, messages = 0, [{"role": "user", "content": row["name"]}]
    async with openai.AsyncOpenAI(base_url=server.url, api_key=server.api_key, max_retries=0) as client:
        for turn in range(turns):
            await asyncio.sleep(slow * random.random())
            found = await client.chat.completions.create(model=server.model, messages=messages, **options)  # pyright: ignore
            message = found.choices[0].message
            letters += len(message.content)
            messages += [message, {"role": "user", "content": f"turn {turn}"}]
    return float(letters)


async def talk_slowly(row: Any, server: Server) -> float:
    return await talk(row, server, slow=0.1)


async def stream(row: Any, server: Server) -> float:
    letters, messages = 0, [{"role": "user", "content": row["name"]}]
    async with openai.AsyncOpenAI() as client:  # finds its server in the environment
        for turn in range(3):
            text = ""
            chunks = await client.chat.completions.create(model="policy", messages=messages, stream=True)  # pyright: ignore
            async for chunk in chunks:
                text += chunk.choices[0].delta.content or ""
            letters += len(text)
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": f"turn {turn}"}]
    return float(letters)


def by_ids(row: Any, server: Server) -> float:
    """Another library, token ids, and no message."""
    ids, n = [40, 50, 60], 0
    for _ in range(2):
        body = {"token_ids": ids, "sampling_params": {"logprobs": 1, "max_tokens": 5}}
        answer = httpx.post(
            server.url.removesuffix("/v1") + "/inference/v1/generate", json=body,
            headers={"Authorization": f"Bearer {server.api_key}"},
        ).json()  # fmt: skip
        new = answer["choices"][0]["token_ids"]
        ids, n = [*ids, *new, 70], n + len(new)
    return float(n)


def test_a_conversation_is_an_episode(engine: Any, tokenizer: Any) -> None:
    for episode in play(engine, tokenizer, talk):
        assert episode.end == "done" and not episode.earlier and len(episode.rewards) == 3
        assert episode.reward == sum(len(m["content"]) for m in episode.messages if m["role"] == "assistant")
        turns = "".join("s" if sampled else "r" for sampled in episode.sampled).replace("r", " ").split()
        assert len(turns) == 3 and max(map(len, turns)) <= 10 and episode.sampled[-1]
        text = tokenizer.decode(episode.prompt_ids + episode.token_ids, skip_special_tokens=False)
        rendered = Chat("test", {}, tokenizer).render(episode.messages[:1], add_generation_prompt=True)
        assert text.startswith(rendered)
        assert all(f"<eos>\n<user>turn {turn}<eos>\n<assistant>" in text for turn in (0, 1))


def test_log_probs_are_of_the_sampled_distribution(engine: Any, tokenizer: Any) -> None:
    for episode in play(engine, tokenizer, talk):
        completion, n = episode.completion(), len(episode.prompt_ids)
        logits = engine.logits(episode.prompt_ids + episode.token_ids)[n - 1 : -1].astype(np.float64) / 0.8
        kept = completion.kept_tokens
        assert kept is not None
        for t, row in enumerate(logits):
            if episode.sampled[t]:
                assert len(kept[t]) == 40  # pyright: ignore[reportArgumentType]
                expected = row[episode.token_ids[t]] - np.logaddexp.reduce(row[kept[t]])
                assert abs(episode.logprobs[t] - expected) < 1e-3


def test_results_do_not_depend_on_time_batch_and_streaming(engine: Any, tokenizer: Any) -> None:
    whole = [facts(episode) for episode in play(engine, tokenizer, talk)]
    assert [facts(episode) for episode in play(engine, tokenizer, talk_slowly)] == whole
    assert [facts(episode) for episode in play(engine, tokenizer, stream)] == whole
    assert [facts(episode) for episode in play(engine, tokenizer, talk, 1, ROWS[:1])] == whole[:1]
    assert len({str(each) for each in whole}) == 4


def test_token_ids_are_episodes_too(engine: Any, tokenizer: Any) -> None:
    for episode in play(engine, tokenizer, by_ids):
        assert episode.prompt_ids == [40, 50, 60] and episode.reward == episode.n_sampled and not episode.earlier
        places = [t for t, sampled in enumerate(episode.sampled) if not sampled]
        assert [episode.token_ids[t] for t in places] == [70] * len(places) and len(places) == 1


# --- tools --------------------------------------------------------------------------------------------------

TOOLS_TEMPLATE = (
    "{% if tools %}<tools>{% for tool in tools %}{{ tool.function.name }},{% endfor %}<tool_call>{% endif %}"
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "<eos>\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
# More spaces than the template writes, and texts that end the episode.
CALL_OR_TEXT = r'(<tool_call>\{"name":   "add", "arguments": \{"a": [1-9],  "b": [1-9]\}\}</tool_call>)|(x[a-f]{2})'


def agent_of_the_docs() -> Any:
    text = (ROOT / "docs" / "environments.md").read_text(encoding="utf-8")
    [code] = re.findall(r"```python\n# agent.py\n(.*?)```", text, re.DOTALL)
    found: dict[str, Any] = {}
    exec(code, found)
    return found["play"]


def test_the_agent_of_the_docs_calls_tools(tmp_path: Any) -> None:
    tokenizer = load_tokenizer(str(write_tiny_model(tmp_path, TOOLS_TEMPLATE, max_position=2048)))
    sampling = SamplingParams(max_new_tokens=800, stop_token_ids=(EOS,), regex=CALL_OR_TEXT, kept_tokens=True, seed=4)
    limits = EpisodeLimits(max_turns=9, timeout_s=60.0, max_turn_tokens=120)
    rows = [{"prompt": f"{i}", "answer": "a"} for i in range(4)]
    with Engine.from_pretrained(tmp_path) as engine:
        engine.tokenizer = tokenizer
        episodes = AgentPlayer(agent_of_the_docs(), tokenizer, [EOS], limits).play(engine, rows, 2, sampling)
    n_calls = 0
    for episode in episodes:
        assert episode.end == "done" and not episode.earlier, episode.error
        *turns, last = episode.messages[1:]
        assert episode.reward == float("a" in last["content"]) and re.fullmatch("x[a-f]{2}", last["content"])
        text = tokenizer.decode(episode.token_ids, skip_special_tokens=False)
        for call, result in zip(turns[::2], turns[1::2], strict=True):
            n_calls += 1
            given = call["tool_calls"][0]["function"]["arguments"]
            arguments = f'{{"a": {given["a"]},  "b": {given["b"]}}}'
            sampled = f'<tool_call>{{"name":   "add", "arguments": {arguments}}}</tool_call>'
            assert result["content"] == str(given["a"] + given["b"])
            assert f"{sampled}<eos>\n<tool>{result['content']}<eos>\n<assistant>" in text
    assert n_calls >= 4


# --- branches -----------------------------------------------------------------------------------------------


async def forget(row: Any, server: Server) -> float:
    """A second turn without what was written before, as a harness that compacts its context."""
    async with openai.AsyncOpenAI() as client:
        for text in (row["name"], row["name"], "summary"):
            messages: Any = [{"role": "user", "content": text}]
            await client.chat.completions.create(model=server.model, messages=messages)
    return 1.0


async def fork(row: Any, server: Server) -> float:
    """Two continuations of one turn, at the same time."""
    async with openai.AsyncOpenAI() as client:
        messages: Any = [{"role": "user", "content": row["name"]}]
        found = await client.chat.completions.create(model=server.model, messages=messages)
        messages.append(found.choices[0].message)

        async def go_on(text: str) -> None:
            await asyncio.sleep(0.05 * random.random())
            more = [*messages, {"role": "user", "content": text}]
            await client.chat.completions.create(model=server.model, messages=more)

        await asyncio.gather(go_on("left"), go_on("right"))
    return 1.0


def test_other_conversations_are_branches(engine: Any, tokenizer: Any) -> None:
    for episode in play(engine, tokenizer, forget):
        _, split = rollout_of([episode]).split_branches([0])
        assert len(split.completions) == 3 and all(all(each.sampled or []) for each in split.completions[:2])
        same, again, other = split.prompt_ids
        assert same == again and split.completions[0].token_ids != split.completions[1].token_ids
        assert tokenizer.decode(other, skip_special_tokens=False) == "<user>"  # what it shares with the opening
        assert episode.n_sampled == sum(each.n_sampled for each in split.completions)


def test_a_shared_turn_is_trained_once(engine: Any, tokenizer: Any) -> None:
    first = play(engine, tokenizer, fork)
    assert [facts(episode) for episode in play(engine, tokenizer, fork)] == [facts(episode) for episode in first]
    for episode in first:
        _, split = rollout_of([episode]).split_branches([0])
        (one, other), (first_ids, second_ids) = split.completions, (each.token_ids for each in split.completions)
        assert split.prompt_ids[0] == split.prompt_ids[1]
        n = 1 + (one.sampled or []).index(False) - 1
        assert first_ids[:n] == second_ids[:n] and all((one.sampled or [])[:n]) and not any((other.sampled or [])[:n])
        assert other.n_sampled > 0 and episode.n_sampled == one.n_sampled + other.n_sampled


# --- limits and settings --------------------------------------------------------------------------------------


async def talk_on(row: Any, server: Server) -> float:
    try:
        return await talk(row, server, turns=9)
    except openai.BadRequestError as error:
        return 100.0 + ("turns" in str(error.code)) + 2 * ("length" in str(error.code))


async def warm(row: Any, server: Server) -> float:
    return await talk(row, server, temperature=0.5)


async def seeded(row: Any, server: Server) -> float:
    return await talk(row, server, seed=3)


async def brief(row: Any, server: Server) -> float:
    return await talk(row, server, max_tokens=3, stop=["q"])


def test_limits_refuse_requests_and_are_counted(engine: Any, tokenizer: Any) -> None:
    for episode in play(engine, tokenizer, talk_on):
        assert episode.reward == 101 and episode.end == "turns" and len(episode.rewards) == 4
    for episode in play(engine, tokenizer, talk_on, max_turns=20, max_turn_tokens=25):
        assert episode.reward == 102 and episode.end == "length" and episode.n_sampled == 60
    for episode in play(engine, tokenizer, brief):
        assert episode.end == "done" and episode.n_sampled <= 9


@pytest.mark.parametrize(("agent", "name"), [(warm, "temperature is 0.5"), (seeded, "seed is 3")])
def test_requests_cannot_change_the_trained_distribution(agent: Any, name: str, engine: Any, tokenizer: Any) -> None:
    for episode in play(engine, tokenizer, agent):
        assert episode.end == "error" and episode.reward is None
        assert_mentions(episode.error, "BadRequestError", name, "the run")


# --- failures ---------------------------------------------------------------------------------------------------


async def fail_on_b(row: Any, server: Server) -> Any:
    if row["name"] == "b" and "how" not in row:
        return await disconnect(server)
    reward = await talk(row, server)
    if row["name"] == "b":
        if row.get("how") == "raise":
            raise ValueError("lost the map")
        if row.get("how") == "die":
            os._exit(3)
        if row.get("how") == "hang":
            await asyncio.sleep(60)
        if row.get("how") == "silent":
            return None
    return reward


async def disconnect(server: Server) -> float:
    """Send a request, close the connection while it is sampled, and return as if all were well."""
    host, port = server.url.split("//")[1].split("/")[0].split(":")
    body = b'{"prompt": "once", "max_tokens": 400}'
    with socket.create_connection((host, int(port))) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {server.api_key}\r\n"
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        await asyncio.sleep(0.3)
    await asyncio.sleep(0.2)
    return 1.0


@pytest.mark.parametrize(
    ("how", "facts_of_error"),
    [
        ("raise", ("ValueError", "lost the map")),
        ("die", ("exit code 3",)),
        ("hang", ("timeout_s=2",)),
        ("silent", ("None", "finite number")),
    ],
)
def test_an_agent_that_fails_has_no_reward(how: str, facts_of_error: Any, engine: Any, tokenizer: Any) -> None:
    good, bad = play(engine, tokenizer, fail_on_b, 1, [ROWS[0], {"name": "b", "how": how}], timeout_s=2.0)
    assert bad.end == "error" and bad.reward is None
    assert_mentions(bad.error, *facts_of_error)
    [expected] = play(engine, tokenizer, talk, 1, ROWS[:1])
    assert facts(good) == facts(expected)


def test_an_agent_that_disconnects_during_a_request_has_no_reward(
    engine: Any, tokenizer: Any, monkeypatch: Any
) -> None:
    expected = play(engine, tokenizer, talk, 1, ROWS[:1], max_turn_tokens=18)
    step = Call.step

    def slow(call: Call) -> None:
        time.sleep(0.05)
        step(call)

    monkeypatch.setattr(Call, "step", slow)
    good, bad = play(engine, tokenizer, fail_on_b, 1, max_turn_tokens=18)
    assert bad.end == "error" and bad.reward is None
    assert_mentions(bad.error, "client went away during a request")
    assert facts(good) == facts(expected[0])


def test_sampling_time_is_not_the_agents(engine: Any, tokenizer: Any, monkeypatch: Any) -> None:
    step = Engine.open_prompt

    def slow(*args: Any, **settings: Any) -> Any:
        time.sleep(0.8)
        return step(*args, **settings)

    monkeypatch.setattr(Engine, "open_prompt", slow)
    start_s = time.monotonic()
    assert all(episode.end == "done" for episode in play(engine, tokenizer, talk, timeout_s=6.0))
    assert time.monotonic() - start_s > 6.0


def test_agents_need_a_native_engine(tokenizer: Any) -> None:
    from tests.rollout.test_episodes import Batches

    assert_raises(Exception, ("Batches", "native"), play, Batches(None), tokenizer, talk)  # pyright: ignore
