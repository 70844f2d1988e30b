"""Rewards of completions under a sequence classifier with one label, differentiable in the model.

The reward is ``w . h``, with the head w, the module ``score``, and the final hidden state h of the last token other
than the ``pad_token_id`` of the config: as in transformers, EOS does not count if it is the padding token.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from whet.errors import WhetTypeError
from whet.learner.batch import PackedBatch, count_unpadded, pack_batch
from whet.nn.accelerate import acceleration_of
from whet.nn.causal_lm import padded_batch, token_lists
from whet.nn.modules import inner_module, module_device


def check_reward_model(model: nn.Module, where: str) -> None:
    """Raise a WhetTypeError unless the model is a sequence classifier of transformers with one label."""
    _reward_parts(model, where)


def completion_rewards(
    model: nn.Module, prompt_ids: Sequence[Sequence[int]], completion_ids: Sequence[Sequence[int]]
) -> Tensor:
    """Return the reward of each completion, (B,) float32 (float64 for a float64 model).

    Args:
        model: a sequence classifier of transformers with ``num_labels=1``, or PEFT over one; run in its current mode.
        prompt_ids: B rows of token ids without padding, at least one token each.
        completion_ids: B rows of token ids without padding; a row may be empty.

    Raises:
        WhetTypeError: another model, or token ids that are not integers.
        WhetValueError: an empty prompt.
    """
    where = "completion_rewards"
    decoder, score = _reward_parts(model, where)
    prompts = token_lists(prompt_ids, where, "prompt_ids", allow_empty=False)
    completions = token_lists(completion_ids, where, "completion_ids", allow_empty=True)
    pad_id = inner_module(model).config.get_text_config().pad_token_id  # pyright: ignore
    completions = [ids[: count_unpadded(ids, pad_id)] for ids in completions]
    if (acceleration := acceleration_of(model)) is not None:
        packed = pack_batch(prompts, [[*ids, 0] for ids in completions])  # a token's state predicts the next one
        ends = packed.steps == np.array(list(map(len, completions)))[packed.rows]
        places = torch.from_numpy(packed.hidden_rows[ends][np.argsort(packed.rows[ends])])
        hidden = acceleration.hidden_states(PackedBatch(*map(torch.from_numpy, packed)), scaled=False)[places]
        hidden = hidden.float()  # of products in bfloat16
    else:
        rows = [prompt + ids for prompt, ids in zip(prompts, completions, strict=True)]
        input_ids, mask = padded_batch(rows, device=module_device(model))
        states = decoder(input_ids=input_ids, attention_mask=mask.long(), use_cache=False)[0]
        hidden = states[torch.arange(len(rows), device=states.device), mask.sum(1) - 1]
    rewards = score(hidden)[:, 0]
    return rewards if rewards.dtype == torch.float64 else rewards.float()


def _reward_parts(model: nn.Module, where: str) -> tuple[nn.Module, nn.Module]:
    """Return decoder and head."""
    inner = inner_module(model)
    decoder = getattr(inner, getattr(inner, "base_model_prefix", None) or "model", None)
    score, n_labels = getattr(inner, "score", None), getattr(getattr(inner, "config", None), "num_labels", None)
    if not isinstance(decoder, nn.Module) or not isinstance(score, nn.Module) or n_labels != 1:
        raise WhetTypeError(
            f"{where}: model is a {type(inner).__name__}{f' with {n_labels} labels' if n_labels else ''}, expected a "
            f"sequence classifier with one. Load it by AutoModelForSequenceClassification with num_labels=1, or pass a "
            f'whet.Learner with "score" in modules_to_save.'
        )
    return decoder, score
