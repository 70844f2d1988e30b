"""``whet`` as a model of EleutherAI's lm-evaluation-harness, in this process.

    python -m whet.evaluation.lm_eval --model whet --model_args pretrained=MODEL,weights=q8_0 --tasks hellaswag

The harness imports no models of other packages. This command registers ``whet``, and then is the harness' own command,
with all of its arguments. In Python, import this module before ``lm_eval.simple_evaluate(model="whet", ...)``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from whet.config.sampling import SamplingParams
from whet.errors import MissingExtraError, WhetValueError
from whet.text.checkpoint_model import resolve_adapter
from whet.text.model import find_model, find_stop_ids, load_chat_tokenizer, load_engine, longest_sequence

# lm-eval is not in the extra that checks types.
# pyright: reportMissingImports=false
try:
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
    from tqdm import tqdm
except ImportError as error:
    raise MissingExtraError("whet.evaluation.lm_eval", "lm-eval", "lm-eval") from error

_WHERE = "lm_eval --model whet"
_CHUNK = 256
"""Sequences per call on the engine, which chooses its batches, and per step of the progress bar."""

Row = tuple[Any, list[int], list[int]]
"""Key in the harness' cache, context and continuation."""


@register_model("whet")
class WhetLM(TemplateLM):
    """A model on Whet's engine. Continuations of a context share its computation.

    Args:
        pretrained: a folder that save_pretrained or whet train wrote, a checkpoint, a .gguf file, or a name on the hub.
        weights: weight format. Default: the GGUF file's own, or bf16 for folders.
        max_length: the most tokens before a scored or sampled one; longer contexts lose their first tokens. Default:
            the model's positions, less one.
        add_bos_token: whether texts begin with BOS. Default: as the tokenizer does it.
        batch_size: ignored: the harness passes a default, and the engine chooses its batches.
        max_batch_size: ignored.
        device: ignored: the engine runs on the CPU.

    Raises:
        WhetValueError: the model cannot be read, or an argument is out of range.
    """

    def __init__(
        self,
        pretrained: str,
        weights: str | None = None,
        max_length: int | None = None,
        add_bos_token: bool | None = None,
        batch_size: Any = None,
        max_batch_size: Any = None,
        device: Any = None,
    ) -> None:
        super().__init__()
        path, adapter = resolve_adapter(pretrained, "", _WHERE)
        self.model = find_model(path, _WHERE)
        self.tokenizer = load_chat_tokenizer(self.model, _WHERE, adapter=adapter)
        self.engine = load_engine(self.model, weights, max_length, _WHERE, adapter)
        self.engine.tokenizer = self.tokenizer
        self._adapter = self.engine.add_adapter(adapter) if adapter else None
        self._stop_ids = find_stop_ids(path, self.tokenizer, self.engine.config.vocab_size, _WHERE)
        most = longest_sequence(self.engine) - 1  # of a context: one more token is scored
        if max_length is not None and not 1 <= max_length <= most:
            raise WhetValueError(f"{_WHERE}: max_length is {max_length}, expected from 1 to {most:,} tokens.")
        self.max_length = max_length or most
        self.pretrained, self._adds_bos = pretrained, add_bos_token

    @property
    def eot_token_id(self) -> int:
        """EOS of the tokenizer."""
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """The context of texts that have none: BOS, or EOS if there is no BOS."""
        bos = getattr(self.tokenizer, "bos_token_id", None)
        return self.eot_token_id if bos is None else bos

    @property
    def tokenizer_name(self) -> str:
        """Name of the tokenizer in the harness' caches."""
        return self.pretrained.replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Return the tokens of a text; without an explicit choice, a text that begins with BOS gets no second one."""
        if add_special_tokens is None:
            prefix = self.tokenizer.decode([self.prefix_token_id], skip_special_tokens=False)
            add_special_tokens = False if prefix and string.startswith(prefix) else self._adds_bos
        options = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        return list(self.tokenizer.encode(string, **options))

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Return the text of a chat."""
        return self.tokenizer.apply_chat_template(
            chat_history, tokenize=False, add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )  # fmt: skip

    def _loglikelihood_tokens(self, requests: Sequence[Row], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Return the log-prob of each continuation, and whether greedy decoding yields it.

        Rows with a common prefix are neighbours in the engine's queue, so that it is computed once.
        """
        order = sorted(range(len(requests)), key=lambda i: requests[i][1] + requests[i][2])
        found: list[tuple[float, bool]] = [(0.0, True)] * len(requests)
        for begin in tqdm(range(0, len(order), _CHUNK), desc="Log-likelihoods", disable=disable_tqdm):
            chunk = order[begin : begin + _CHUNK]
            rows = [(requests[i][1] + requests[i][2])[-self.max_length - 1 :] for i in chunk]
            starts = [max(1, len(row) - len(requests[i][2])) for i, row in zip(chunk, rows, strict=True)]
            scores = self.engine.logprobs(rows, start=starts, top_logprobs=1, adapter=self._adapter)
            for i, row, start, values, tops in zip(chunk, rows, starts, *scores, strict=True):
                is_greedy = all(token == top for token, [(top, _)] in zip(row[start:], tops, strict=True))
                found[i] = float(values.sum(dtype="float64")), is_greedy
                if requests[i][0] is not None:
                    self.cache_hook.add_partial("loglikelihood", requests[i][0], found[i])
        return found

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        """Return the log-prob of each text, in windows of ``max_length`` tokens."""
        found = []
        for (text,) in tqdm([request.args for request in requests], desc="Texts", disable=disable_tqdm):
            windows = get_rolling_token_windows(self.tok_encode(text), self.prefix_token_id, self.max_length, 1)
            rows: list[Row] = [(None, *make_disjoint_window(window)) for window in windows]
            found.append(sum(value for value, _ in self._loglikelihood_tokens(rows, disable_tqdm=True)))
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), found[-1])
        return found

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        """Return the completion of each context, up to its first stop string."""
        groups: dict[str, list[int]] = {}
        for i, request in enumerate(requests):
            groups.setdefault(repr(request.args[1]), []).append(i)
        found = [""] * len(requests)
        for indices in groups.values():
            given = requests[indices[0]].args[1]
            settings: dict[str, Any] = dict(normalize_gen_kwargs(given))
            until = handle_stop_sequences(settings.pop("until", None), eos=None)
            sampling, n_new = self._sampling(settings, until), settings["max_gen_toks"]
            prompts = [self.tok_encode(requests[i].args[0])[-(self.max_length - n_new) :] for i in indices]
            completions = self.engine.generate_each(prompts, 1, sampling, adapter=self._adapter)
            progress = tqdm(indices, desc="Completions", disable=disable_tqdm)
            for i, [completion] in zip(progress, completions, strict=True):
                text = completion.text
                if text is None:
                    text = self.tokenizer.decode(completion.token_ids, skip_special_tokens=True)
                found[i] = postprocess_generated_text(text, until, None)
                self.cache_hook.add_partial("generate_until", (requests[i].args[0], given), found[i])
        return found

    def _sampling(self, settings: dict[str, Any], until: list[str]) -> SamplingParams:
        """Return the engine's settings of a task's.

        Raises:
            WhetValueError: a setting is not supported, or leaves no room for a context.
        """
        n_new = settings["max_gen_toks"]
        if not 0 < n_new < self.max_length:
            raise WhetValueError(
                f"{_WHERE}: max_gen_toks is {n_new}, expected less than max_length={self.max_length}. Pass "
                f"--gen_kwargs max_gen_toks={self.max_length // 2}."
            )
        names = {"temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed"}
        unknown = sorted(settings.keys() - names - {"do_sample", "max_gen_toks"})
        if unknown:
            raise WhetValueError(f"{_WHERE}: gen_kwargs has {', '.join(unknown)}, expected {', '.join(sorted(names))}.")
        chosen = {name: value for name, value in settings.items() if name in names}
        if not settings["do_sample"]:
            chosen["temperature"] = 0.0
        return SamplingParams(
            max_new_tokens=n_new, stop_token_ids=self._stop_ids, stop=[text for text in until if text], **chosen
        )


if __name__ == "__main__":
    cli_evaluate()
