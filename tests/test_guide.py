"""Every snippet of the post-training guide, with ``rlox`` replaced by ``whet``, on tiny modules."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from tests.raising import mentions
from torch import nn

torch.set_num_threads(1)  # the models are tiny

VOCAB = 11


class MyLanguageModel(nn.Module):
    """Causal recurrent net, forward(input_ids) -> logits."""

    def __init__(self, vocab_size: int = VOCAB, hidden: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, hidden)
        self.mixer = nn.GRU(hidden, hidden, batch_first=True)
        self.head = nn.Linear(hidden, vocab_size)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.mixer(self.embedding(input_ids))[0])


class MyGenerator(MyLanguageModel):
    """Policy with its own generate, as rlox's online algorithms require."""

    def generate(self, input_ids: torch.Tensor, max_new_tokens: int) -> torch.Tensor:
        for _ in range(max_new_tokens):
            probs = self(input_ids)[:, -1].softmax(-1)
            input_ids = torch.cat([input_ids, torch.multinomial(probs, 1)], dim=1)
        return input_ids


@pytest.fixture(autouse=True)
def fixed_seed():
    torch.manual_seed(0)


@pytest.fixture(params=[MyLanguageModel, MyGenerator])
def model(request):
    return request.param(vocab_size=VOCAB, hidden=8)


@pytest.fixture
def ref_model(model):
    # The guide: a frozen reference copy.
    ref_model = type(model)(vocab_size=VOCAB, hidden=8)
    ref_model.load_state_dict(model.state_dict())
    for p in ref_model.parameters():
        p.requires_grad = False
    return ref_model


def pairs(n: int) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    return [tuple(torch.randint(VOCAB, (1, length)) for length in (4, 5, 3)) for _ in range(n)]


def score_completion(completion: torch.Tensor) -> float:
    return (completion == 3).float().mean().item()


def reward_fn(completions: list[torch.Tensor]) -> list[float]:
    """Score completions. Higher is better."""
    return [score_completion(c) for c in completions]


def test_primitives():
    import whet

    rng = np.random.default_rng(0)
    log_probs_policy, log_probs_ref = -rng.random(6), -rng.random(6)
    kl = whet.compute_token_kl(log_probs_policy, log_probs_ref)
    ratio = log_probs_policy - log_probs_ref
    assert kl == pytest.approx((np.exp(log_probs_policy) * ratio).sum())
    kl = whet.compute_token_kl_schulman(log_probs_policy, log_probs_ref)
    assert kl == pytest.approx((np.exp(-ratio) + ratio - 1).sum())

    log_p_flat, log_q_flat = -rng.random(3 * 512), -rng.random(3 * 512)
    kl_per_seq = whet.compute_batch_token_kl(log_p_flat, log_q_flat, seq_len=512)
    assert kl_per_seq.shape == (3,) and kl_per_seq.dtype == np.float64
    kl_per_seq = whet.compute_batch_token_kl_schulman_f32(
        log_p_flat.astype(np.float32),
        log_q_flat.astype(np.float32),
        seq_len=512,
    )
    assert kl_per_seq.shape == (3,) and kl_per_seq.dtype == np.float32

    rewards = np.array([1.0, 0.0, 1.0, 0.0])
    assert whet.compute_group_advantages(rewards).tolist() == pytest.approx([1, -1, 1, -1])
    advantages = whet.compute_batch_group_advantages(np.tile(rewards, 4), group_size=8)
    assert advantages.tolist() == pytest.approx([1, -1] * 8)

    from whet import pack_sequences

    assert sorted(map(sorted, pack_sequences([1000, 1500, 548, 1048], max_length=2048))) == [[0, 3], [1, 2]]


def test_dpo(model, ref_model, tmp_path, capsys):
    from whet.algorithms.dpo import DPO

    dataset = pairs(3)
    dpo = DPO(
        model=model,
        ref_model=ref_model,
        beta=0.1,  # KL penalty strength
        learning_rate=1e-4,
    )
    before = model.head.weight.detach().clone()
    for prompt, chosen, rejected in dataset:
        metrics = dpo.train_step(prompt, chosen, rejected)
        print(f"Loss: {metrics['loss']:.4f}")
    assert capsys.readouterr().out.startswith(f"Loss: {math.log(2):.4f}\n")  # policy = reference at first
    assert not torch.equal(model.head.weight, before)

    dpo.save(tmp_path / "dpo_checkpoint.pt")
    dpo_loaded = DPO.from_checkpoint(tmp_path / "dpo_checkpoint.pt", env_id="unused")
    step = dpo_loaded.train_step(*dataset[0])
    assert step["loss"] == dpo.train_step(*dataset[0])["loss"] != pytest.approx(math.log(2))
    assert step["grad_norm"] > 0


def test_grpo(model, ref_model, tmp_path, capsys):
    from whet.algorithms.grpo import GRPO

    dataloader = torch.utils.data.DataLoader(torch.randint(VOCAB, (6, 4)), batch_size=2)
    grpo = GRPO(
        model=model,
        ref_model=ref_model,
        reward_fn=reward_fn,
        group_size=4,  # completions per prompt
        kl_coef=0.1,  # KL penalty
        learning_rate=1e-4,
        max_new_tokens=128,
    )
    assert grpo.config.beta == 0.1
    for prompt_batch in dataloader:
        metrics = grpo.train_step(prompt_batch)
        print(f"Loss: {metrics['loss']:.4f}, Mean reward: {metrics['mean_reward']:.2f}, KL: {metrics['mean_kl']:.4f}")
    assert capsys.readouterr().out.count("KL: ") == 3
    assert metrics["mean_kl"] > 0 and 0 <= metrics["mean_reward"] <= 1
    assert metrics["completions/max_length"] == 128

    grpo.save(tmp_path / "grpo_checkpoint.pt")
    assert GRPO.from_checkpoint(tmp_path / "grpo_checkpoint.pt", reward_fn=reward_fn).step == 3


def test_the_default_coefficient_with_a_reference(model, ref_model, tmp_path, capsys):
    """rlox's default of kl_coef, which is not in the guide."""
    from whet.algorithms.grpo import GRPO

    grpo = GRPO(model, ref_model, reward_fn, group_size=4, max_new_tokens=4)
    assert grpo.config.beta == 0.1 and "kl" in grpo.train_step(torch.randint(VOCAB, (2, 4)))
    assert capsys.readouterr().out.startswith("GRPO: beta is 0.1, the default with a ref_model. Pass beta (or kl_coef)")
    grpo.save(tmp_path / "c")
    again = GRPO.from_checkpoint(tmp_path / "c", reward_fn=reward_fn)
    assert again.config.beta == 0.1 and again.ref_model is not None
    assert GRPO(model, reward_fn=reward_fn).config.beta == 0 and not capsys.readouterr().out
    assert GRPO(model, ref_model, reward_fn, kl_estimator="k1").config.kl_estimator == "k1"
    with pytest.raises(ValueError, match=mentions("kl_estimator", "'k1'", "no effect", "beta is 0")):
        GRPO(model, reward_fn=reward_fn, kl_estimator="k1")
    with pytest.raises(ValueError, match=mentions("ref_model", "no effect")):
        GRPO(model, ref_model, reward_fn, beta=0.0)


def test_epochs_and_evaluation(model, ref_model):
    """train(prompts, n_epochs) and evaluate(prompts) of rlox's class, which are not in the guide."""
    from whet.algorithms.grpo import GRPO

    prompts = torch.randint(VOCAB, (6, 4))
    settings = {"group_size": 4, "max_new_tokens": 8, "learning_rate": 1e-2, "batch_size": 6, "beta": 0.1}
    grpo = GRPO(model, ref_model, reward_fn, **settings)
    before = grpo.evaluate(prompts)
    assert isinstance(before, float) and 0 <= before <= 1 and before == grpo.evaluate(prompts)
    metrics = grpo.train(prompts, n_epochs=3)
    assert grpo.step == 3 and 0 <= metrics["mean_reward"] <= 1


def test_online_dpo(model, ref_model):
    from whet.algorithms.online_dpo import OnlineDPO

    seen = []

    def preference_fn(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> list[int]:
        """Return 0 if first completion is preferred, 1 if second."""
        seen.extend(pairs)
        return [0 if score_completion(a) > score_completion(b) else 1 for a, b in pairs]

    online_dpo = OnlineDPO(
        model=model,
        ref_model=ref_model,
        preference_fn=preference_fn,
        beta=0.1,
        learning_rate=1e-4,
    )
    for prompt_batch in torch.randint(VOCAB, (2, 3, 4)):
        metrics = online_dpo.train_step(prompt_batch)
    assert len(seen) == 6 and seen[0][0].shape == (online_dpo.config.max_new_tokens,) and not torch.equal(*seen[0])
    assert math.isfinite(metrics["loss"]) and metrics["grad_norm"] > 0


def test_best_of_n(model):
    from whet.algorithms.best_of_n import BestOfN

    bon = BestOfN(
        model=model,
        reward_fn=reward_fn,
        n=8,  # generate 8 candidates
        max_new_tokens=128,
    )
    prompts = torch.randint(VOCAB, (3, 4))
    best_completions = bon.generate(prompts)  # (B, P+T)
    assert best_completions.shape == (3, 4 + 128)
    assert torch.equal(best_completions[:, :4], prompts)


def test_custom_training_loop():
    import whet

    def get_per_token_logprobs(model, completions):
        logits = model(completions)[:, :-1]
        return logits.log_softmax(-1).gather(-1, completions[:, 1:, None]).squeeze(-1)

    def compute_loss(policy_logprobs, advantages, kl_per_seq):
        return -(policy_logprobs.mean(1) * torch.from_numpy(advantages).float()).mean() + 0.1 * kl_per_seq.mean()

    model, ref_model = MyLanguageModel(), MyLanguageModel()
    ref_model.load_state_dict(model.state_dict())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    dataloader = [(torch.randint(VOCAB, (8, 4)), torch.randint(VOCAB, (8, 6))) for _ in range(2)]
    kls = []
    for batch in dataloader:
        prompts, completions = batch
        policy_logprobs = get_per_token_logprobs(model, completions)
        with torch.no_grad():
            ref_logprobs = get_per_token_logprobs(ref_model, completions)

        p = policy_logprobs.detach().cpu().numpy().astype(np.float32).ravel()
        r = ref_logprobs.cpu().numpy().astype(np.float32).ravel()
        seq_len = policy_logprobs.shape[-1]
        kl_per_seq = whet.compute_batch_token_kl_schulman_f32(p, r, seq_len)
        mean_kl = float(kl_per_seq.mean())
        kls.append(mean_kl)

        rewards = np.array(reward_fn(completions))
        advantages = whet.compute_batch_group_advantages(rewards, group_size=4)

        loss = compute_loss(policy_logprobs, advantages, kl_per_seq)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
    assert kls[0] == 0 and kls[1] > 0
    assert len(prompts) == len(completions)


def test_callbacks(model, ref_model):
    """Callbacks in the guide's text: rlox's, and ours with the method that rlox calls."""
    from whet.algorithms.dpo import DPO
    from whet.training.callbacks import Callback

    class Own(Callback):
        def __init__(self):
            self.seen = []

        def on_train_batch(self, **metrics):
            self.seen.append(metrics)

    class OfRlox:
        def __init__(self):
            self.seen = []

        def on_training_start(self, **kwargs):
            self.seen.append("start")

        def on_train_batch(self, **metrics):
            self.seen.append(metrics)

        def on_step(self, **kwargs):
            self.seen.append(kwargs)
            return kwargs["step"] < 2

        def on_training_end(self, **kwargs):
            self.seen.append("end")

    own, other = Own(), OfRlox()
    dpo = DPO(model=model, ref_model=ref_model, callbacks=[own, other], batch_size=1)
    last = dpo.train([(p[0], c[0], r[0]) for p, c, r in pairs(4)])
    assert dpo.step == 2 and len(own.seen) == 2 and own.seen[1] == last
    first = {"reward": 0.0, "step": 1}
    assert other.seen == ["start", own.seen[0], first, last, {"reward": 0.0, "step": 2}, "end"]


def test_monitoring(model, ref_model, capsys, monkeypatch):
    from whet.algorithms.dpo import DPO
    from whet.training.loggers import ConsoleLogger, WandbLogger  # the guide's rlox.logging

    logger = ConsoleLogger(log_interval=100)
    dpo = DPO(model=model, ref_model=ref_model, logger=logger)
    dpo.train_step(*pairs(1)[0])
    assert "loss 0.6931" in capsys.readouterr().out

    monkeypatch.setitem(__import__("sys").modules, "wandb", None)  # not installed
    with pytest.raises(ImportError, match=mentions("'whet[wandb]'", "pip", "install")):
        WandbLogger(project="my-llm-training")
