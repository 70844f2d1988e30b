"""The model's Python programs: as a tool, and as a reward for programs that pass tests.

    whet train grpo --tools whet.tasks.code:python ...
    whet train grpo --reward whet.tasks.code:passes_tests --data rows.jsonl ...      rows with prompt and tests

Programs run in ``whet.system.sandbox``: without network, with a temporary folder, and with limits of time, memory,
processes and output. Without a sandbox they are refused, unless ``unsafe_local`` allows them to run as this user.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

from whet.data.thinking import answer_in
from whet.errors import WhetTypeError
from whet.system.sandbox import Run, Sandbox
from whet.tasks.mixture import final_answer

_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)


@dataclass(frozen=True)
class Interpreter:
    """Runs programs with the limits of a sandbox. Its methods are tools and reward functions."""

    sandbox: Sandbox = field(default_factory=Sandbox)

    def python(self, code: str) -> str:
        """Run a Python program and return what it prints.

        Args:
            code: the program; it has no network, and a new empty folder
        """
        found = self.sandbox.run(code)
        return "\n".join(filter(None, [found.output.rstrip("\n"), *_marks(found, self.sandbox)])) or "(no output)"

    def passes_tests(self, completions: Sequence[Any], tests: Sequence[str | Sequence[str]]) -> list[float]:
        """Return 1 for each program that passes all of its tests, else 0: a share of them would reward special cases.

        The program is the last block of Python code in the answer, or the whole answer without one. Tests are Python
        statements, such as ``assert add(1, 2) == 3``, which run after it, in the same process and time limit; a program
        that ends before them fails.

        Args:
            completions: texts, or lists of messages, whose last turn is the answer.
            tests: of each completion, a text or a list of texts.

        Raises:
            WhetTypeError: tests are anything else.
        """
        for i, each in enumerate(tests):
            texts = [each] if isinstance(each, str) else each
            if not isinstance(texts, Sequence) or not texts or not all(isinstance(text, str) for text in texts):
                raise WhetTypeError(
                    f"passes_tests: tests[{i}] is {each!r:.60}, expected Python statements: a text or a list of texts."
                )
        joined = [each if isinstance(each, str) else "\n".join(each) for each in tests]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            return list(pool.map(self._score, completions, joined))

    def _score(self, completion: Any, tests: str) -> float:
        # A program that exits early, or prints what it likes, does not know the last line.
        mark = secrets.token_hex(16)
        ending = f"import os, sys\nsys.stdout.flush()\nos.write(1, b'\\n{mark}')"
        found = self.sandbox.run(f"{program_in(completion)}\n\n{tests}\n{ending}\n")
        return float(found.status == 0 and found.tail.endswith(mark))


def _marks(found: Run, sandbox: Sandbox) -> list[str]:
    """Return lines on what limits did to a program."""
    n_left_out = found.n_bytes - sandbox.output_bytes
    marks = [f"[truncated: the first {sandbox.output_bytes:,} of {found.n_bytes:,} bytes]"] if n_left_out > 0 else []
    if found.status is None:
        return [*marks, f"[ended after the time limit of {sandbox.timeout_s:g} s]"]
    return [*marks, f"[exit status {found.status}]"] if found.status else marks


def program_in(completion: Any) -> str:
    """Return the last block of Python code in an answer, or the whole answer without one; "" without an answer."""
    answer = final_answer(completion)
    answer = (answer_in(answer) if isinstance(answer, str) else None) or ""
    blocks = _BLOCK.findall(answer)
    return blocks[-1] if blocks else answer


def prepare(functions: Iterable[Callable[..., Any]], *, unsafe_local: bool = False) -> list[Callable[..., Any]]:
    """Return tools or reward functions whose programs can run: each ``Interpreter`` among them is tried.

    Args:
        functions: any functions.
        unsafe_local: whether programs may run without a sandbox.

    Raises:
        WhetValueError: there is no sandbox, and ``unsafe_local`` is off.
    """
    return [_prepare(function, unsafe_local) for function in functions]


def _prepare(function: Callable[..., Any], unsafe_local: bool) -> Callable[..., Any]:
    owner = getattr(function, "__self__", None)
    if not isinstance(owner, Interpreter):
        return function
    sandbox = replace(owner.sandbox, unsafe_local=unsafe_local or owner.sandbox.unsafe_local)
    sandbox.check()
    return getattr(replace(owner, sandbox=sandbox), function.__name__)


def runs_programs(specs: Sequence[str]) -> bool:
    """Whether one of the specs of tools or reward functions names a function of this module."""
    return any(spec.startswith(f"{__name__}:") for spec in specs)


_default = Interpreter()
python, passes_tests = _default.python, _default.passes_tests
