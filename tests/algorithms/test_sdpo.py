"""SDPO: samples and their teachers, a step by hand and against TRL, on modules and a learner; resuming, errors."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.cli.conftest import write_tiny_model
from tests.raising import assert_raises
from tests.rollout.test_episodes import TEMPLATE
from tests.tiny import (
    EOS,
    ScriptedEngine,
    assert_resumes,
    assert_same_weights,
    letters_tokenizer,
    tiny_llama,
    token_logprobs,
    weights,
)

from whet.algorithms import SDPO, SDPOConfig
from whet.data.chat import Chat
from whet.errors import RewardError, WhetTypeError, WhetValueError
from whet.learner import Learner
from whet.losses import distillation_loss
from whet.models.packed_base import pack_base
from whet.models.sources.live import open_module
from whet.models.tokenizers import load_tokenizer

# a to h are the tokens 4 to 11.
PROMPTS = ["bc", "d", "e"]
GROUPS = [[[4, EOS], [9, 9, EOS], [7, EOS]], [[10, 6], [8, 8], [8]], [[6, 4], [4, EOS], [6, 7, 4]]]
TEMPLATES: Any = {
    "reprompt_template": "{prompt}{solution}{feedback}h",
    "solution_template": "g{solution}",
    "feedback_template": "f{feedback}",
}
LESSONS = [  # of samples that contain an a, by hand: prompt, g, the first other sample with an a, h
    (1, "bcgah"), (2, "bcgah"), (6, "egah"), (7, "egcah"), (8, "egcah"),
]  # fmt: skip


def has_a(completions: list[str]) -> list[float]:
    return [float("a" in text) for text in completions]


def feedback_on_e(completions: list[str], prompts: list[str]) -> list[str | None]:
    return [f"{prompt}{{prompt}}" if "e" in text else None for text, prompt in zip(completions, prompts, strict=True)]


def make(model: Any = None, **settings: Any) -> SDPO:
    given: dict[str, Any] = {"learning_rate": 0.02, "engine": ScriptedEngine(GROUPS), "max_new_tokens": 4, "n": 3}
    given |= {"tokenizer": letters_tokenizer(), "reward_fn": has_a, **TEMPLATES}
    if settings.get("feedback_fn") is None:
        del given["feedback_template"]
    return SDPO(model or tiny_llama(), **given | settings)


def learner_of(model: Any) -> Learner:
    return Learner(pack_base(open_module(model), weights="float32"), lora_rank=4, compute="float32")


def lesson_rows(tokenizer: Any) -> list[tuple[list[int], list[int], list[int]]]:
    """Return prompt, teacher's prompt and completion of each lesson."""
    encode = lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]  # noqa: E731
    return [(encode(PROMPTS[i // 3]), encode(text), GROUPS[i // 3][i % 3]) for i, text in LESSONS]


def test_samples_are_taught_by_another_that_succeeded() -> None:
    trainer = make(learning_rate=0.0)
    asked: list[Any] = []
    score = trainer.logprobs
    trainer.logprobs = lambda *a, **b: asked.append(a[:2]) or score(*a, **b)  # pyright: ignore[reportAttributeAccessIssue]
    metrics = trainer.train_step(PROMPTS)
    rows = lesson_rows(trainer.tokenizer)
    assert asked == [([row[1] for row in rows], [row[2] for row in rows])]
    assert [row["taught"] for row in trainer.last_completions] == [i in dict(LESSONS) for i in range(9)]
    assert metrics["taught/frac"] == pytest.approx(5 / 9) and metrics["taught/solved_frac"] == pytest.approx(2 / 3)
    assert metrics["mean_reward"] == pytest.approx(4 / 9) and metrics["taught/too_long_frac"] == 0
    failed = make(learning_rate=0.0, taught="failed")
    failed.train_step(PROMPTS)
    assert [i for i, row in enumerate(failed.last_completions) if row["taught"]] == [1, 2]


@pytest.mark.parametrize("micro_batch_size", [0, 2])
def test_a_step_is_autograds(micro_batch_size: int) -> None:
    model, expected, settings = tiny_llama(), tiny_llama(), {"temperature": 0.7, "micro_batch_size": micro_batch_size}
    metrics = make(model, learning_rate=0.0, compute="float32", **settings).train_step(PROMPTS)
    rows = lesson_rows(letters_tokenizer())
    own = torch.cat([token_logprobs(expected, row[0], row[2], 0.7) for row in rows])[None].double()
    teacher = torch.cat([token_logprobs(expected, row[1], row[2], 0.7) for row in rows])[None].double().detach()
    value, _ = distillation_loss(own, teacher, torch.ones_like(own, dtype=torch.bool))
    value.backward()
    norm = torch.stack([each.grad.norm() for each in expected.parameters() if each.grad is not None]).norm()
    by_hand = (own - teacher).mean().item()
    assert metrics["loss"] == metrics["reverse_kl"] == pytest.approx(by_hand, abs=1e-5) == value.item()
    assert metrics["grad_norm"] == pytest.approx(norm.item(), rel=1e-4) and metrics["grad_norm"] > 0
    assert metrics["teacher_logprob"] == pytest.approx(teacher.mean().item(), rel=1e-5)


def test_a_learner_takes_the_step_of_modules() -> None:
    whole = make(learning_rate=0.0, compute="float32").train_step(PROMPTS)
    found = make(learner_of(tiny_llama())).train_step(PROMPTS)
    assert found["loss"] == pytest.approx(whole["loss"], abs=1e-5) and found["grad_norm"] > 0


def test_the_gradient_is_trls() -> None:
    """TRL averages over rows: the same for rows of one length. Its value is not the divergence, its gradient is."""
    trl = pytest.importorskip("trl.experimental.sdpo.loss_utils", reason="pip install 'whet[peers]'")
    rng = torch.Generator().manual_seed(3)
    student = torch.randn(3, 4, 12, dtype=torch.float64, generator=rng, requires_grad=True)
    teacher = torch.randn(3, 4, 12, dtype=torch.float64, generator=rng)
    ids = torch.randint(12, (3, 4), generator=rng)
    trls = trl.compute_sampled_token_self_distillation_loss(student, teacher, ids, distillation_alpha=1.0)
    [expected] = torch.autograd.grad(trls.mean(1).mean(), student)
    own, others = (logits.log_softmax(-1).gather(-1, ids[..., None])[..., 0] for logits in (student, teacher))
    value, _ = distillation_loss(own, others, torch.ones(3, 4, dtype=torch.bool))
    [found] = torch.autograd.grad(value, student)
    assert torch.allclose(found, expected, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_whole_distributions_are_trls(beta: float) -> None:
    trl = pytest.importorskip("trl.experimental.sdpo.loss_utils", reason="pip install 'whet[peers]'")
    model, learner = tiny_llama(), learner_of(tiny_llama())
    trainer = make(learner, divergence="full", beta=beta, temperature=0.7)
    metrics = trainer.train_step(PROMPTS)
    found = []
    for prompt, teacher, ids in lesson_rows(trainer.tokenizer):
        student_logits, teacher_logits = (
            model(torch.tensor([each + ids])).logits[:, len(each) - 1 : -1].double().detach() / 0.7
            for each in (prompt, teacher)
        )
        found.append(
            trl.compute_full_logit_self_distillation_loss(student_logits, teacher_logits, distillation_alpha=beta)[0]
        )
    assert metrics["loss"] == metrics["divergence"] == pytest.approx(torch.cat(found).mean().item(), rel=1e-5)
    assert metrics["grad_norm"] > 0 and "reverse_kl" not in metrics


def test_lessons_are_trls() -> None:
    """TRL's builder chooses the same samples and renders the same prompts, with the same templates."""
    sdpo = pytest.importorskip("trl.experimental.sdpo.sdpo_trainer", reason="pip install 'whet[peers]'")
    accelerate = pytest.importorskip("accelerate")
    tokenizer, feedback = letters_tokenizer(), ["f", None, "c", None, "", "d", None, None, "b"]
    arguments = SimpleNamespace(
        reprompt_template=TEMPLATES["reprompt_template"], max_reprompt_len=99, success_reward_threshold=1.0,
        solution_template=TEMPLATES["solution_template"].replace("{solution}", "{successful_previous_attempt}"),
        feedback_template=TEMPLATES["feedback_template"].replace("{feedback}", "{feedback_raw}"),
        dont_reprompt_on_self_success=True, environment_feedback_only_without_solution=False,
        use_successful_as_teacher=True, include_environment_feedback=True, remove_thinking_from_demonstration=False,
    )  # fmt: skip
    trainer = SimpleNamespace(
        args=arguments, accelerator=accelerate.Accelerator(cpu=True), num_generations=3, _tokenizer=tokenizer,
        processing_class=tokenizer, model=SimpleNamespace(training=True),
        _tokenize_prompts_untruncated=lambda prompts: tokenizer(prompts)["input_ids"],
    )  # fmt: skip
    rows = [ids for group in GROUPS for ids in group]
    ids = torch.tensor([[*row, *[0] * (3 - len(row))] for row in rows])
    prompts = [prompt for prompt in PROMPTS for _ in range(3)]
    rewards = torch.tensor(has_a([tokenizer.decode(row, skip_special_tokens=True) for row in rows]))
    builder = sdpo.SuccessfulRolloutTeacherContextBuilder(trainer)
    built = builder.build({"completion_ids": ids, "completion_mask": (ids != 0).long()}, prompts, rewards, feedback)
    padded = zip(built["teacher_input_ids"], built["teacher_attention_mask"].bool(), strict=True)
    expected = [row[mask].tolist() for row, mask in padded]
    own = make(feedback_fn=lambda completions: feedback, learning_rate=0.0)
    asked: list[Any] = []
    score = own.logprobs
    own.logprobs = lambda *a, **b: asked.append(a[:2]) or score(*a, **b)  # pyright: ignore[reportAttributeAccessIssue]
    metrics = own.train_step(PROMPTS)
    taught = built["self_distillation_mask"].bool().tolist()
    assert [row["taught"] for row in own.last_completions] == taught and sum(taught) == 7
    [(teachers, completions)] = asked
    assert [a + b for a, b in zip(teachers, completions, strict=True)] == [
        row for row, is_taught in zip(expected, taught, strict=True) if is_taught
    ]
    theirs = builder.last_metrics
    assert metrics["taught/frac"] == pytest.approx(theirs["self_distillation/reprompt_sample_fraction"])
    assert metrics["taught/feedback_frac"] == pytest.approx(theirs["self_distillation/feedback_used_fraction"])
    assert metrics["taught/solved_frac"] == pytest.approx(theirs["self_distillation/success_group_fraction"])


def test_feedback_teaches_without_rewards() -> None:
    trainer = make(**_feedback())
    lessons = trainer._lessons(trainer.sample(PROMPTS, 3), None)
    assert lessons.rows == [4, 5] and "taught/solved_frac" not in lessons.metrics
    texts = [trainer.tokenizer.decode(ids) for ids in lessons.prompt_ids]
    assert texts == [f"dfd{' ' * len('{prompt}')}h"] * 2  # the tokenizer has no braces
    before = weights(trainer.model)
    metrics = trainer.train_step(PROMPTS)
    assert metrics["taught/feedback_frac"] == pytest.approx(2 / 9) and "mean_reward" not in metrics
    assert any((before[name] != value).any() for name, value in weights(trainer.model).items())


def test_a_batch_without_lessons_changes_nothing() -> None:
    trainer = make(success_threshold=2.0)
    metrics = trainer.train_step(PROMPTS)
    assert metrics["loss"] == metrics["grad_norm"] == metrics["taught/frac"] == 0 and trainer.n_updates == 0
    assert_same_weights(trainer.model, tiny_llama())


def test_a_teachers_prompt_that_does_not_fit_is_counted() -> None:
    trainer = make(tiny_llama(max_position_embeddings=7))
    metrics = trainer.train_step(PROMPTS)
    # With the completion, the lessons have 8, 7, 6, 7 and 8 tokens.
    assert metrics["taught/frac"] == pytest.approx(3 / 9) and metrics["taught/too_long_frac"] == pytest.approx(2 / 9)
    trainer = make(tiny_llama(max_position_embeddings=5), max_new_tokens=2)
    with pytest.warns(UserWarning, match="5 prompts of the teacher .* 5 positions"):
        assert trainer.train_step(PROMPTS)["taught/frac"] == 0


@pytest.mark.parametrize("as_learner", [False, True])
def test_demonstrations_teach_what_the_reader_would_write(as_learner: bool) -> None:
    """SDFT: the divergence from the fixed model that reads the demonstration falls; no rewards are needed."""
    rows = [
        {"prompt": prompt, "answer": answer} for prompt, answer in zip("bcde", ["aaa", "ghg", "hh", "eff"], strict=True)
    ]
    model = learner_of(tiny_llama()) if as_learner else tiny_llama()
    settings = {"reward_fn": None, "demonstration": "answer", "teacher_weights": "reference", "engine": "auto", "n": 8}
    trainer = make(model, batch_size=4, max_new_tokens=5, **settings)
    before = trainer.evaluation_metrics(rows)
    history = [trainer.train_step(rows)["reverse_kl"] for _ in range(40)]
    assert (
        list(before) == ["reverse_kl"] and trainer.evaluation_metrics(rows)["reverse_kl"] < 0.7 * before["reverse_kl"]
    )
    assert np.mean(history[-5:]) < 0.6 * np.mean(history[:5])


def test_messages_are_extended_in_the_last(tmp_path: Any) -> None:
    folder = write_tiny_model(tmp_path / "model", TEMPLATE)
    from transformers import AutoModelForCausalLM

    tokenizer, model = load_tokenizer(folder), AutoModelForCausalLM.from_pretrained(folder)
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": [{"type": "text", "text": "Q {x}"}]}]
    demonstration = {"reward_fn": None, "demonstration": "answer", "tokenizer": tokenizer, "n": 1, "engine": "auto"}
    trainer = make(model, **demonstration)
    lessons = trainer._lessons(trainer.sample([{"prompt": messages, "answer": "A{prompt}"}], 1), None)
    text = Chat("test", {}, tokenizer).render(
        [messages[0], {"role": "user", "content": "Q {x}gA{prompt}h"}], add_generation_prompt=True
    )
    assert lessons.prompt_ids == [tokenizer(text, add_special_tokens=False)["input_ids"]]
    reply = [*messages, {"role": "assistant", "content": "So"}]
    row = {"prompt": reply, "answer": "A"}
    assert_raises(WhetValueError, ("'assistant'", "user"), trainer.train_step, [row])
    assert_raises(
        WhetValueError, ("demonstration is 'answer'", "no such column"), trainer.train_step, [{"prompt": "a"}]
    )
    assert_raises(WhetValueError, ("a row has 3",), trainer.train_step, [{"prompt": "a", "answer": 3}])


@pytest.mark.parametrize("as_learner", [False, True])
@pytest.mark.parametrize(
    "settings",
    [{}, {"feedback_fn": feedback_on_e}, {"teacher_weights": "reference", "ref_sync_steps": 1, "ref_sync_alpha": 1.0}],
)  # fmt: skip
def test_a_run_resumes_to_the_bit(settings: Any, as_learner: bool, tmp_path: Any) -> None:
    functions = {"reward_fn": has_a, "tokenizer": letters_tokenizer(), "feedback_fn": settings.get("feedback_fn")}
    given = {**settings, "engine": "auto", "batch_size": 2, "n": 6, "max_new_tokens": 6}
    new = lambda: learner_of(tiny_llama()) if as_learner else tiny_llama()  # noqa: E731
    assert_resumes(lambda: make(new(), **given), PROMPTS * 2, tmp_path, **functions)


def test_the_teacher_may_be_a_moving_average(tmp_path: Any) -> None:
    average = {"teacher_weights": "reference", "ref_sync_steps": 1, "ref_sync_alpha": 0.25}
    trainer = make(**average)
    first = weights(trainer.model)
    trainer.train_step(PROMPTS)
    reference = dict(trainer.policy.reference.model.named_parameters())
    for name, value in weights(trainer.model).items():
        assert torch.allclose(reference[name], 0.75 * first[name] + 0.25 * value, atol=1e-7)
    assert_raises(WhetValueError, ("ref_sync_alpha", "adapters"), make, learner_of(tiny_llama()), **average)


def test_invalid_arguments_are_rejected() -> None:
    assert_raises(WhetTypeError, ("SDPO", "tokenizer is missing"), SDPO, tiny_llama(), reward_fn=has_a)
    assert_raises(WhetTypeError, ("nothing teaches", "feedback_fn"), make, reward_fn=None)
    assert_raises(WhetTypeError, ("feedback_fn is 3",), make, feedback_fn=3)
    assert_raises(WhetValueError, ("n is 1", "2 or more"), make, n=1)
    assert_raises(WhetValueError, ("reward_policy", "no reward"), make, **_feedback(reward_policy="zero"))
    assert_raises(WhetValueError, ("success_threshold is 0.5", "no reward"), make, **_feedback(success_threshold=0.5))
    assert_raises(WhetValueError, ("taught is 'failed'", "no reward"), make, **_feedback(taught="failed"))
    assert_raises(WhetValueError, ("feedback_template", "no feedback_fn"), make, feedback_template="{feedback}")
    assert_raises(WhetValueError, ("solution_template", "no solutions"), make, reward_fn=None, feedback_fn=len)
    assert_raises(WhetValueError, ("reprompt_template", "{feedback}"), make, reprompt_template="{prompt}{solution}")
    assert_raises(WhetValueError, ("ref_sync_steps", "no reference"), make, ref_sync_steps=1)
    assert_raises(WhetValueError, ("ref_model",), make, ref_model=tiny_llama())
    assert_raises(WhetValueError, ("'full'", "Learner", "'sampled'"), make, divergence="full")
    full = {"divergence": "full", "teacher_weights": "reference"}
    assert_raises(WhetValueError, ("'reference'", "'full'", "'live'"), make, learner_of(tiny_llama()), **full)
    assert_raises(WhetValueError, ("top_k is 5", "whole distributions"), make, top_k=5)
    assert_raises(WhetTypeError, ("environment", "GRPO"), make, environment=object)
    assert_raises(WhetValueError, ("token ids", "texts or messages"), make().train_step, [[5, EOS, 6], [5]])
    fails = make(feedback_fn=lambda completions: [3 for _ in completions])
    assert_raises(RewardError, ("call_feedback", "returned 3 for completion 0"), fails.train_step, PROMPTS)
    short = make(feedback_fn=lambda completions: ["a"])
    assert_raises(RewardError, ("1 texts for 9",), short.train_step, PROMPTS)

    def raises(completions: Any, answer: Any) -> Any: ...

    assert_raises(RewardError, ("raises", "'answer'"), make(feedback_fn=raises).train_step, PROMPTS)


def _feedback(**settings: Any) -> dict[str, Any]:
    return {
        "reward_fn": None, "feedback_fn": feedback_on_e, "solution_template": SDPOConfig.solution_template,
        **settings,
    }  # fmt: skip
