"""SFT: against an update in plain torch, inputs, and accumulated micro-batches."""

from __future__ import annotations

import copy
import math
from functools import partial

import numpy as np
import pytest
import torch
from tests.engine.tiny_models import tiny_model
from tests.raising import assert_raises, mentions
from tests.tiny import (
    EOS,
    TinyModel,
    assert_close_weights,
    assert_resumes,
    assert_same_steps,
    assert_same_weights,
    letters_tokenizer,
    make_trainer,
    padded,
    tiny_llama,
    token_logprobs,
    weights,
    with_lora,
)
from torch import nn
from torch.utils.data import DataLoader
from transformers import default_data_collator
from transformers.integrations.neftune import neftune_post_forward_hook
from transformers.trainer_pt_utils import LabelSmoother

from whet.algorithms.sft import SFT
from whet.errors import RowError, WhetTypeError, WhetValueError
from whet.learner import Learner
from whet.learner.batch import Neftune, pack_batch
from whet.models.packed_base import pack_base
from whet.models.sources.live import open_module
from whet.nn.causal_lm import completion_logprobs

PROMPTS = [[5, 6], [7]]
COMPLETIONS = [[4, 8, EOS], [9]]
make = partial(make_trainer, SFT)


def negative_log_likelihood(model, pairs):
    total = sum(token_logprobs(model, p, c).sum() for p, c in pairs)
    return -total / sum(len(c) for _, c in pairs)


@pytest.mark.parametrize("micro_batch_size", [0, 1])
def test_updates_match_plain_torch(micro_batch_size):
    sft, own = make(micro_batch_size=micro_batch_size), TinyModel()
    optimizer = torch.optim.AdamW(own.parameters(), lr=0.02, weight_decay=0.0)
    for _ in range(3):
        loss = negative_log_likelihood(own, list(zip(PROMPTS, COMPLETIONS, strict=True)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        metrics = sft.train_step(PROMPTS, COMPLETIONS)
        assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-9)
        assert metrics["num_tokens"] == 7 * sft.step
    assert_close_weights(sft.model, own, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("make_model", [tiny_llama, lambda: with_lora(tiny_llama())])
def test_trains_hugging_face_models_and_adapters(make_model):
    model = make_model()
    expected = negative_log_likelihood(model, list(zip(PROMPTS, COMPLETIONS, strict=True))).item()
    sft = make(model)
    history = [sft.train_step(PROMPTS, COMPLETIONS)["loss"] for _ in range(10)]
    assert history[0] == pytest.approx(expected, rel=1e-5)
    assert history[-1] < history[0]


def test_loss_on_all_tokens():
    sft = make(loss_on="all")
    metrics = sft.train_step(PROMPTS, COMPLETIONS)
    whole = [([5], [6, 4, 8, EOS]), ([7], [9])]
    assert metrics["loss"] == pytest.approx(negative_log_likelihood(TinyModel(), whole).item(), rel=1e-9)


def make_conversation():
    """Return a tokenizer, a conversation of two turns, and its prompt, completion and mask by hand."""
    tokenizer = letters_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ 'g' if m.role == 'user' else 'h' }}{{ m.content }}"
        "{{ eos_token if m.role == 'assistant' }}{% endfor %}{{ 'h' if add_generation_prompt }}"
    )
    turns = [("user", "a"), ("assistant", "b"), ("user", "cd"), ("assistant", "ef")]
    row = {"messages": [{"role": role, "content": content} for role, content in turns]}
    return tokenizer, row, [10, 4, 11], [5, EOS, 10, 6, 7, 11, 8, 9, EOS], [1, 1, 0, 0, 0, 0, 1, 1, 1]


@pytest.mark.parametrize("make_model", [TinyModel, tiny_llama])
@pytest.mark.parametrize("micro_batch_size", [0, 1])
def test_only_assistant_turns_count(make_model, micro_batch_size):
    tokenizer, row, prompt, completion, mask = make_conversation()
    rows = [row, {"prompt": [5, 6], "completion": [4, EOS]}]
    model = make_model()
    logprobs = token_logprobs(model, prompt, completion)[torch.tensor(mask, dtype=torch.bool)]
    loss = -(logprobs.sum() + token_logprobs(model, [5, 6], [4, EOS]).sum()) / 7
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    sft = make(model, tokenizer=tokenizer, micro_batch_size=micro_batch_size)
    assert sft.evaluate(rows) == pytest.approx(loss.item(), rel=1e-5)
    computed = []  # freed after the update
    sft.policy.optimizer.register_step_pre_hook(
        lambda *_: computed.append([p.grad.clone() for p in model.parameters()])
    )
    metrics = sft.train_step(rows)
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert metrics["num_tokens"] == len(prompt + completion) + 4
    for gradient, expected in zip(computed[0], gradients, strict=True):
        torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("loss_on", "n_prompt"), [("last_turn", 9), ("all", 1)])
def test_loss_on_the_last_turn_or_all_of_a_conversation(loss_on, n_prompt):
    tokenizer, row, prompt, completion, _ = make_conversation()
    whole = prompt + completion
    sft, by_ids = make(tokenizer=tokenizer, loss_on=loss_on), make()
    sft.train_step([row])
    by_ids.train_step([whole[:n_prompt]], [whole[n_prompt:]])
    assert_same_weights(sft.model, by_ids.model)


def test_tokenised_rows_train_on_their_labels():
    model = tiny_llama()
    input_ids, labels = torch.tensor([[1, 5, 6, 4, 8, EOS], [1, 7, 9, 0, 0, 0]]), torch.full((2, 6), -100)
    labels[0, 3:], labels[1, 2] = input_ids[0, 3:], 9
    attention_mask = torch.tensor([[1] * 6, [1] * 3 + [0] * 3])
    expected = model(input_ids, attention_mask=attention_mask, labels=labels).loss.item()
    batch = {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}
    rows = [{name: column[i].tolist() for name, column in batch.items()} for i in range(2)]
    masked = [{"input_ids": row["input_ids"], "completion_mask": [i != -100 for i in row["labels"]]} for row in rows]
    dataset = pytest.importorskip("datasets").Dataset.from_list(rows)
    loader = DataLoader(dataset, batch_size=2, collate_fn=default_data_collator)
    for form in (batch, rows, masked):
        assert make(model, learning_rate=0.0).train_step(form)["loss"] == pytest.approx(expected, rel=1e-5)
    for form in (rows, dataset, dataset.with_format("torch"), [batch], loader):
        sft = make(model, learning_rate=0.0, batch_size=2)
        assert sft.train(form, 1)["loss"] == pytest.approx(expected, rel=1e-5)
        assert sft.evaluate(form) == pytest.approx(expected, rel=1e-5)


def test_all_forms_of_a_batch_are_equivalent():
    batches = [
        (PROMPTS, COMPLETIONS),
        (padded(PROMPTS, left=True), padded(COMPLETIONS, left=False)),
        ([{"prompt": p, "completion": c} for p, c in zip(PROMPTS, COMPLETIONS, strict=True)],),
        (list(zip(PROMPTS, COMPLETIONS, strict=True)),),
        ({"prompt": PROMPTS, "completion": COMPLETIONS},),
        ([torch.tensor(p) for p in PROMPTS], COMPLETIONS),
    ]
    assert_same_steps(make, batches)


def test_a_tensor_of_completions_ends_at_eos():
    cut, ragged = make(stop_token_ids=[EOS]), make()
    cut.train_step(torch.tensor([[5, 6], [7, 8]]), torch.tensor([[4, 8, EOS, 0, 0], [9, EOS, EOS, EOS, EOS]]))
    ragged.train_step([[5, 6], [7, 8]], [[4, 8, EOS], [9, EOS]])
    assert_same_weights(cut.model, ragged.model)


def test_rows_of_text_are_tokenised():
    sft = make(tokenizer=letters_tokenizer())
    sft.train_step([{"prompt": "bc", "completion": "ae"}, {"text": "dab"}])
    by_ids = make()
    by_ids.train_step([[5, 6], [7]], [[4, 8, EOS], [4, 5, EOS]])
    assert_same_weights(sft.model, by_ids.model)
    texts, by_ids = make(tokenizer=letters_tokenizer()), make()
    texts.train_step(["dab"])
    texts.train_step(["bc", "d"], ["ae", "h"])
    by_ids.train_step([[7]], [[4, 5, EOS]])
    by_ids.train_step([[5, 6], [7]], [[4, 8, EOS], [11, EOS]])
    assert_same_weights(texts.model, by_ids.model)


@pytest.mark.parametrize("loss_on", ["completion", "all"])
@pytest.mark.parametrize("batch_size", [1, 2, 8])
def test_evaluation_is_the_loss_of_all_rows_and_changes_nothing(loss_on, batch_size):
    rows = [{"prompt": p, "completion": c} for p, c in zip(PROMPTS, COMPLETIONS, strict=True)]
    rows += [{"text": [4, 5, 6, 7]}]
    sft = make(TinyModel(dropout=0.5), loss_on=loss_on, batch_size=batch_size)
    state = torch.get_rng_state()
    found = sft.evaluate(rows)
    assert sft.evaluate(iter(rows)) == sft.evaluation_metrics(rows)["loss"] == found
    assert torch.equal(torch.get_rng_state(), state) and sft.step == sft.num_tokens == 0
    assert_same_weights(sft.model, TinyModel())
    stepped = make(loss_on=loss_on).train_step(rows)
    assert found == pytest.approx(stepped["loss"], rel=1e-9)
    with pytest.raises(WhetValueError, match=mentions("SFT", "completion of the dataset")):
        sft.evaluate([{"prompt": [5], "completion": []}])


def test_all_tokens_of_bare_rows_count():
    trained, stepped = make(batch_size=2), make()
    trained.train([[5, 6, 7], torch.tensor([8, 9])], steps=1)
    stepped.train_step([[5], [8]], [[6, 7], [9]])
    assert_close_weights(trained.model, stepped.model)
    pairs = make(batch_size=2)
    pairs.train([([5], [6, 7]), ([8], [9])], steps=1)
    assert_same_weights(pairs.model, trained.model)


def test_dropout_is_on_in_training_and_modes_are_restored():
    model = TinyModel(dropout=0.5).eval()
    sft = make(model)
    torch.manual_seed(0)
    first = sft.train_step(PROMPTS, COMPLETIONS)["loss"]
    assert first != pytest.approx(make(TinyModel()).train_step(PROMPTS, COMPLETIONS)["loss"], rel=1e-6)
    assert not model.training and not model.dropout.training
    off = make(TinyModel(dropout=0.5), training_mode=False).train_step(PROMPTS, COMPLETIONS)
    assert off["loss"] == pytest.approx(make().train_step(PROMPTS, COMPLETIONS)["loss"])


def test_invalid_batches_are_rejected():
    with pytest.raises(WhetValueError, match=mentions("SFT", "prompt 2", "completion 1")):
        make().train_step(PROMPTS, COMPLETIONS[:1])
    assert_raises(WhetValueError, ("SFT", "completion of the batch"), make().train_step, [[5], [6]])
    assert_raises(WhetTypeError, ("tokenizer",), make().train_step, [{"prompt": "a", "completion": "b"}])
    assert_raises(WhetValueError, ("'completion'", "'last_turn'", "'all'"), make, loss_on="prompt")


# --- long rows ----------------------------------------------------------------------------------------

LONG = [{"input_ids": [5] * n} for n in (4, 64, 65, 80)]


def test_a_row_longer_than_the_models_positions_is_rejected():
    facts = ("SFT", "row 2 of the batch", "65 tokens", "last position is 64", "Shorten")
    for trainer in (make(tiny_llama()), make(tiny_llama(), compute="torch")):
        assert_raises(WhetValueError, facts, trainer.train_step, LONG)
        assert trainer.train_step(LONG[:2])["num_tokens"] == 68
        assert_raises(RowError, ("row 2 of the dataset", "SFT", "65 tokens"), trainer.evaluate, LONG)
    assert make().train_step(LONG)["num_tokens"] == 213  # a model without a position limit
    assert_raises(WhetValueError, ("max_length is 65", "last position is 64"), make, tiny_llama(), max_length=65)
    facts = ("completion_logprobs", "row 1", "66 tokens", "last position is 64")
    assert_raises(WhetValueError, facts, completion_logprobs, tiny_llama(), [[5], [5]], [[5], [5] * 65])


def test_long_rows_are_dropped_or_cut_and_counted():
    row = {"prompt": [5, 6], "completion": [4, 8, 9, EOS]}
    short, full = {"prompt": [5, 6], "completion": [4, 8]}, {"prompt": [7] * 4, "completion": [9]}
    with pytest.warns(UserWarning, match=mentions("SFT", "1 of 2", "4 tokens", "max_length")):
        dropped = make(max_length=4, truncation="drop").train_step([row, short])
    assert (dropped["frac_truncated"], dropped["frac_dropped"], dropped["num_tokens"]) == (0, 0.5, 4)
    assert dropped["loss"] == make(max_length=4).train_step([short])["loss"]
    with pytest.warns(UserWarning, match=mentions("2 of 3", "4 tokens")):
        cut = make(max_length=4, truncation="truncate").train_step([row, short, full])
    assert (cut["frac_truncated"], cut["frac_dropped"]) == (1 / 3, 1 / 3)
    assert cut["loss"] == make().train_step([short, short])["loss"]
    with pytest.warns(UserWarning, match=mentions("8", "dropped")):
        trainer = make(max_length=4, truncation="drop")
        before = weights(trainer.model)
        metrics = trainer.train([row] * 8, steps=1)
    assert (metrics["loss"], metrics["frac_dropped"], trainer.step, trainer.n_updates) == (0, 1, 1, 0)
    assert all(torch.equal(value, before[name]) for name, value in weights(trainer.model).items())


def test_dft_weighs_tokens_by_their_probability():
    """A step on modules and on a learner; evaluation stays the negative log-likelihood."""
    rows = [([5, 6], [4, 5, 2]), ([7], [6, 6, 2])]
    model = tiny_llama()
    logprobs = torch.cat([token_logprobs(model, *row) for row in rows])
    expected = -(logprobs.exp() * logprobs).mean().item()
    learner = Learner(pack_base(open_module(model), weights="float32"), lora_rank=2, compute="float32")
    for each in (model, learner):
        trainer = SFT(each, loss_type="dft", learning_rate=0.0, compute="float32")
        assert trainer.train_step(rows)["loss"] == pytest.approx(expected, rel=1e-5)
        assert trainer.evaluate(rows) == pytest.approx(-logprobs.mean().item(), rel=1e-5)


# --- label smoothing and NEFTune ------------------------------------------------------------------------

PAIRS = [([5, 6], [4, 5, 2]), ([7], [6, 6, 2])]


def learner_of(model, **settings):
    return Learner(pack_base(open_module(model), weights="float32"), lora_rank=2, compute="float32", **settings)


def test_label_smoothing_is_transformers_loss_and_gradient():
    """With the rows padded as transformers pads them; its sum over the vocabulary is float32, torch's float64."""
    model, own = TinyModel(), TinyModel()
    ids = torch.tensor([p + c + [0] * (5 - len(p + c)) for p, c in PAIRS])
    labels = torch.full_like(ids, -100)
    for i, (p, c) in enumerate(PAIRS):
        labels[i, len(p) : len(p + c)] = torch.tensor(c)
    theirs = LabelSmoother(epsilon=0.1)({"logits": own(ids)}, labels, shift_labels=True)
    expected = nn.functional.cross_entropy(own(ids)[:, :-1].mT, labels[:, 1:], label_smoothing=0.1)
    assert theirs.item() == pytest.approx(expected.item(), rel=1e-7)
    expected.backward()
    for size in (0, 1):
        sft, computed = make(copy.deepcopy(model), label_smoothing=0.1, micro_batch_size=size), {}
        named = dict(sft.model.named_parameters())
        sft.policy.optimizer.register_step_pre_hook(
            lambda *_, named=named, computed=computed: computed.update({n: p.grad.clone() for n, p in named.items()})
        )
        assert sft.train_step(PAIRS)["loss"] == pytest.approx(expected.item(), rel=1e-12)
        assert sft.evaluate(PAIRS) == pytest.approx(make(sft.model).evaluate(PAIRS), rel=1e-12)  # not smoothed
        for name, parameter in own.named_parameters():
            torch.testing.assert_close(computed[name], parameter.grad, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("settings", [{"label_smoothing": 0.1}, {"neftune_alpha": 5.0}])
def test_modules_and_a_learner_make_the_same_steps(settings, tmp_path):
    """Also torch's own modules, micro-batches, and a continued run."""
    learner = learner_of(tiny_llama())
    learner.save_pretrained(tmp_path)

    from peft import PeftModel

    def adapted():
        return PeftModel.from_pretrained(tiny_llama(), tmp_path, is_trainable=True)

    rows = [*PAIRS, ([5, 6], [8, 9, 4, 2])]
    given = {"batch_size": 3, "learning_rate": 1e-2, **settings}
    runs = [
        make(learner, **given),
        make(learner_of(tiny_llama()), **given, micro_batch_size=1),
        make(adapted(), **given),
        make(adapted(), **{**given, "compute": "torch"}),
    ]
    steps = [[run.train_step(rows) for _ in range(3)] for run in runs]
    if "neftune_alpha" in settings:  # the length of a shared prompt's row is known to a whole batch only
        steps.pop(1)
    for name in ("loss", "grad_norm"):
        for step in zip(*steps, strict=True):
            assert [each[name] for each in step[1:]] == pytest.approx([step[0][name]] * (len(step) - 1), rel=2e-4)
    off = make(learner_of(tiny_llama()), batch_size=3).train_step(rows)
    assert abs(off["loss"] - steps[0][0]["loss"]) > 1e-4
    assert_resumes(lambda: make(learner_of(tiny_llama()), **given), rows, tmp_path)
    assert_resumes(lambda: make(tiny_llama(), **given), rows, tmp_path / "modules")


def test_noise_has_transformers_bound_and_depends_only_on_seed_and_row():
    batch = pack_batch([[5, 6], [7], [5, 6]], [[4, 5, 2], [6, 6, 2], [8, 9, 4, 2]])
    noise = Neftune(5.0, 3).draw(batch, 400)
    # Rows of 5, 4 and 6 tokens; the prompt of rows 0 and 2 has the bound of row 2.
    bounds = [5 / math.sqrt(n * 400) for n in (6, 6, 5, 5, 6, 6, 6, 4, 4, 4)]
    largest = np.abs(noise).max(1)
    assert noise.shape == (10, 400) and (largest <= bounds).all() and (largest > 0.98 * np.array(bounds)).all()
    np.testing.assert_allclose(noise.std(1), np.array(bounds) / math.sqrt(3), rtol=0.1)
    assert np.abs(np.corrcoef(noise) - np.eye(10)).max() < 0.25
    single = Neftune(5.0, 3).draw(pack_batch([[7]], [[6, 6, 2]]), 400)
    assert np.array_equal(single, noise[7:])
    assert not np.array_equal(Neftune(5.0, 4).draw(batch, 400), noise)
    embedding = torch.nn.Embedding(9, 400)
    embedding.neftune_noise_alpha = 5.0
    theirs = neftune_post_forward_hook(embedding, None, torch.zeros(1, 6, 400)).abs().max().item()
    assert theirs == pytest.approx(bounds[0], rel=0.01)


@pytest.mark.parametrize("case", ["gemma3", "granite", "gpt2", "lfm2"])
def test_noise_is_added_to_the_inputs_of_the_first_layer(case):
    """After the scale of the embedding, wherever the model has it."""
    model, neftune = tiny_model(case), Neftune(5.0, 1)
    prompts, completions = [[5, 6], [7]], [[4, 5, 2], [6, 6, 2]]
    learner = learner_of(model)
    plain, found = (learner.logprobs(prompts, completions, neftune=given).logprobs for given in (None, neftune))
    by_torch = completion_logprobs(model, prompts, completions, neftune=neftune).logprobs.detach().numpy()
    assert np.abs(found - plain).max() > 1e-3
    np.testing.assert_allclose(found, by_torch, rtol=1e-4, atol=1e-4)


def test_smoothing_and_noise_without_effect_are_rejected():
    assert_raises(WhetValueError, ("label_smoothing", "0.1", "'dft'"), make, loss_type="dft", label_smoothing=0.1)
    assert_raises(
        WhetValueError, ("neftune_alpha", "5.0", "training_mode"), make, training_mode=False, neftune_alpha=5.0
    )
    assert_raises(WhetValueError, ("label_smoothing", "1.0", "[0, 1)"), make, label_smoothing=1.0)
    facts = ("neftune", "TinyModel", "get_input_embeddings", "Omit")
    assert_raises(WhetTypeError, facts, make(neftune_alpha=5.0).train_step, PAIRS)
