"""The LoRA suites: runs do the same work in Whet and TRL, are checked for it, and are cached if they take hours."""

import importlib.util
import math
from dataclasses import replace

import pytest
from tests.benchmarks.serving import serve_here
from tests.raising import mentions
from tests.representatives import cases

from benchmarks.contenders.training import lora, native, trl
from benchmarks.contenders.training.lora import Weights, Work, run_error, run_whole
from benchmarks.contenders.training.workload import DPOShape, GRPOShape
from benchmarks.suites import lora as suite
from benchmarks.suites import lora_learning
from benchmarks.suites.grpo import TINY
from whet.bench import NotMeasured
from whet.bench.harness import QUICK, run_case
from whet.errors import WhetValueError

NATIVE_ONLY = ("distill", "reward")
HAS_TRL = importlib.util.find_spec("trl") is not None
SHAPES = {
    "grpo": GRPOShape(TINY, n_prompts=2, group_size=4, prompt_length=9, completion_length=12, seed=3),
    "dpo": DPOShape(TINY, n_pairs=4, prompt_length=9, completion_length=12, seed=3),
}
SHAPES["rloo"] = SHAPES["grpo"]
SHAPES["distill"] = replace(SHAPES["grpo"], n_prompts=8, group_size=1)
SHAPES |= dict.fromkeys(("sft", "simpo", "kto", "reward"), SHAPES["dpo"])
PEER = {"base": "float32", "bf16": False, "gradient_checkpointing": False, "micro_batch": 2}


@pytest.fixture(scope="module")
def weights():
    return Weights.random(TINY)


def work_of(weights, method, **settings):
    if method == "sums":
        sizes = {"n_prompts": 2, "group_size": 2, "max_new_tokens": 5, "n_held_out": 4}
        return Work.on_sums(weights, TINY, **{**sizes, "n_steps": 2, **settings})
    return Work.of_shape(method, weights, SHAPES[method], **{"n_steps": 2, **settings})


def steps_here(serve, work, settings):
    """Run the steps of a trainer in this process, which saves the start of a fresh process."""
    return serve_here(serve, work.n_steps, replace(work), settings)


def test_run_is_a_separate_process(weights):
    run = run_whole(native.serve_lora, work := work_of(weights, "grpo"), {"base": "q8_0"})
    assert run_error(run.value, work) == 0
    assert len(run.samples_s) == 1 and run.start_s > 0 and run.curve == []
    assert {"forward", "backward", "optimizer"} <= set(run.parts)
    assert 0 < sum(sum(part) for part in run.parts.values()) <= 1.01 * sum(run.samples_s)
    assert run.peak_bytes is None or (run.memory["weights"] > 0 and sum(run.memory.values()) <= run.peak_bytes)


@pytest.mark.parametrize("is_native", [False, True])
@pytest.mark.parametrize("method", [*SHAPES, "sums"])
def test_run_of_whet_does_its_work(weights, method, is_native):
    if method in NATIVE_ONLY and not is_native:
        pytest.skip("the suite has no row of it on modules")
    work, settings = work_of(weights, method), {"base": "q4_k_m", "is_native": is_native}
    assert run_error(lora.Answer(steps_here(native.serve_lora, work, settings)), work) == 0


@pytest.mark.skipif(not HAS_TRL, reason="TRL is not installed")
@pytest.mark.parametrize("method", cases([*SHAPES, "sums"], lambda method: method == "grpo"))
def test_trl_has_the_same_rows_and_loss(weights, method):
    work = work_of(weights, method)
    theirs = run_whole(trl.serve_lora, work, PEER)
    assert run_error(theirs.value, work) == 0
    steps = steps_here(native.serve_lora, work, {"base": "float32", "is_native": True})
    assert [step.tokens.rows for step in steps] == [step.tokens.rows for step in theirs.value.steps]
    ours, first = steps[0], theirs.value.steps[0]
    head = TINY.config.hidden_dim if method == "reward" else 0
    assert ours.n_trained == first.n_trained == lora.n_adapter_parameters(TINY) + head
    if not work.samples:
        assert ours.loss == pytest.approx(first.loss, rel=0.01)  # bfloat16, if the machine supports it
        assert ours.grad_norm == pytest.approx(first.grad_norm, rel=0.05)
        by_hand = {"dpo": math.log(2), "reward": math.log(2), "kto": 0.5}  # without adapters or head: no preference
        assert first.loss == pytest.approx(by_hand.get(method, first.loss), rel=1e-4)
    elif method == "rloo":  # leads over the others of a group sum to 0
        assert ours.loss == pytest.approx(0, abs=1e-6) and first.loss == pytest.approx(0, abs=1e-6)
    elif method == "distill":  # of different samples, with noise
        assert ours.loss > 0 and ours.loss == pytest.approx(first.loss, rel=0.05)


def test_all_weights_are_trained_without_a_base(weights):
    work = work_of(weights, "grpo")
    steps = steps_here(native.serve_lora, work, {"base": ""})
    assert run_error(lora.Answer(steps), work) == 0
    assert steps[0].n_trained == TINY.config.n_parameters


def test_run_with_other_work_is_wrong(weights):
    work = work_of(weights, "grpo")
    steps = steps_here(native.serve_lora, work, {"base": "bf16"})
    tokens = steps[1].tokens
    others = [
        steps[:1],
        [steps[0], steps[1]._replace(tokens=tokens._replace(rows="other"))],
        [steps[0], steps[1]._replace(tokens=tokens._replace(n_completion=tokens.n_completion - 1))],
        [steps[0], steps[1]._replace(n_trained=7)],
        [steps[0], steps[1]._replace(loss=math.nan)],
    ]
    assert run_error(lora.Answer(steps), work) == 0
    assert [run_error(lora.Answer(other), work) for other in others] == [1.0] * len(others)


def test_order_of_rows_depends_on_the_seed(weights):
    first, again, second = (work_of(weights, "sums", seed=seed) for seed in (1, 1, 2))
    assert first.expected() == again.expected() != second.expected()
    trained = {str(row["prompt"]) for step in range(3) for row in first.rows(step)}
    assert len(trained) == 6 and not trained & {str(row["prompt"]) for row in first.held_out()}


def test_reward_accepts_texts_and_messages(weights):
    work = work_of(weights, "sums")
    rows = work.rows(0)
    right = [work._sums[0].rows[row["row"]]["answer"] for row in rows]
    numbers = [row["row"] for row in rows]
    assert work.reward(right, row=numbers) == [1.0, 1.0]
    messages = [[{"role": "assistant", "content": text}] for text in [right[0], "none"]]
    assert work.reward(messages, row=numbers)[0] == 1.0 > work.reward(messages, row=numbers)[1]


def test_run_is_a_row_of_its_samples(weights):
    case = suite.work_case("run", lambda seed: work_of(weights, "grpo", n_steps=3, seed=seed), 8, 1e3)
    providers = [suite.whet("whet", "q4_k_m"), suite.contender("broken", native.serve_lora, base="q9")]
    table = suite.work_table("runs", [case], providers, "", 2)
    good, bad = run_case(table, case, providers, 1, QUICK, 0).rows
    assert good.status == "measured" and len(good.samples_s) == 2 and good.start_s is not None
    assert good.peak_bytes is None or good.memory
    assert bad.status == "failed" and "q9" in bad.why


def test_operations_by_hand():
    shape = SHAPES["grpo"]
    config, tokens, completions = TINY.config, 2 * 9 + 8 * 12, 8 * 12
    head = config.vocab_size * config.hidden_dim
    matrices = 2 * (tokens * (TINY.n_weights - head) + completions * head)
    adapters = 8 * tokens * lora.n_adapter_parameters(TINY)
    keys = 2 * 9**2 / 2 + completions * (9 + 6)
    attention = 4 * config.n_layers * config.n_heads * config.head_dim * keys
    expected = 3 * matrices + 4.5 * attention + adapters
    assert lora.lora_step_flops(shape, quantised=False) == pytest.approx(expected)
    saved = 0.5 * (matrices + attention)
    assert lora.lora_step_flops(shape, quantised=True) == pytest.approx(expected - saved)
    for method, n_passes in (("rloo", 1), ("distill", 1)):  # one more: a reference, a teacher
        assert lora.lora_step_flops(shape, method) == pytest.approx(expected + n_passes * (matrices + attention))


def test_operations_of_pairs_by_hand():
    shape = DPOShape(TINY, n_pairs=2, prompt_length=10, completion_length=4)
    config, tokens, completions = TINY.config, 2 * 10 + 4 * 4, 4 * 4
    head = config.vocab_size * config.hidden_dim
    layers, logits = 2 * tokens * (TINY.n_weights - head), 2 * completions * head
    keys = 2 * 10**2 / 2 + completions * (10 + 2)
    attention = 4 * config.n_layers * config.n_heads * config.head_dim * keys
    adapters = 8 * tokens * lora.n_adapter_parameters(TINY)
    one = layers + logits + attention
    for method, expected in {
        "simpo": 2 * (layers + logits) + 3.5 * attention,
        "dpo": one + 2 * (layers + logits) + 3.5 * attention,
        "kto": 3 * one + 2 * (layers + logits) + 3.5 * attention,
        "reward": 2 * layers + 3.5 * attention,
    }.items():
        assert lora.lora_step_flops(shape, method) == pytest.approx(expected + adapters, rel=1e-6)


def test_random_folders_are_deterministic(weights):
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(weights.folder, dtype=torch.float32)
    assert sum(p.numel() for p in model.parameters()) == TINY.config.n_parameters
    deviation = model.model.layers[1].mlp.up_proj.weight.std().item()
    assert deviation == pytest.approx(0.02, rel=0.05)
    assert model.model.norm.weight.mean().item() == pytest.approx(1, abs=0.02)
    folder = weights.folder
    other = Weights.random(TINY)
    assert [f.read_bytes() for f in sorted(folder.glob("*.safetensors"))] == [
        f.read_bytes() for f in sorted(other.folder.glob("*.safetensors"))
    ]
    gone = other.folder
    del other
    assert not gone.exists()


def test_learning_runs_are_cached(weights, tmp_path):
    def make(seed):
        return work_of(weights, "sums", n_steps=3, seed=seed, evaluate_every=1)

    provider, work = lora_learning.cache_runs(suite.whet("whet", "q8_0"), make, tmp_path), make(1)
    run = provider.prepare(1)()
    assert [step for step, _ in run.curve] == [0, 1, 2] and all(0 <= score <= 1 for _, score in run.curve)
    (file,) = tmp_path.iterdir()
    changed = file.read_text().replace(f'"start_s": {run.start_s}', '"start_s": 12.5')
    file.write_text(changed)
    again = provider.prepare(1)()
    assert again.start_s == 12.5 and again.curve == run.curve and run_error(again.value, work) == 0
    assert again.value == run.value
    with pytest.raises(NotMeasured, match=mentions("seed 2")):
        lora_learning.cache_runs(suite.peer("TRL"), make, tmp_path, 2).prepare(3)


def test_lora_suites_have_every_row():
    tables = {table.title: table for table in suite.tables(suite.LoraOptions())}
    names = {provider.name for provider in tables["GRPO on sums, LoRA, SmolLM2-135M"].providers}
    bases = {"whet", "whet float32", "whet q8_0", "whet q4_k_m", "whet all weights"}
    assert bases | {"TRL + PEFT", "TRL + PEFT 4 bits", "TRL all weights"} <= names
    for title in ("GRPO, LoRA, 0.5 B Qwen2", "GRPO, LoRA, 1.5 B Qwen2"):
        (case,) = tables[title].cases
        assert case.n_items == 4 * 8 * (128 + 128) and case.n_flops > 0
    assert {f"{m}, LoRA, {size}" for m in ("DPO", "SFT") for size in ("SmolLM2-135M", "0.5 B Qwen2")} <= set(tables)
    others = {"SimPO": "8 pairs", "KTO": "16 rows", "Reward": "8 pairs", "RLOO": "4 x 8", "Distill": "32 x 1"}
    for name, size in others.items():
        table = tables[f"{name}, LoRA, SmolLM2-135M"]
        assert table.cases[0].name.startswith(size)
        assert {"whet", "whet, recomputed", "TRL + PEFT", "TRL + PEFT micro-batch 8"} <= {
            provider.name for provider in table.providers
        }
    assert suite.QWEN2_1500M.config.n_parameters == pytest.approx(1.54e9, rel=0.01)


def test_settings_without_steps_or_model_are_rejected():
    with pytest.raises(WhetValueError, match=mentions("whet bench lora:", "steps is 1", "at least 2")):
        suite.tables(suite.LoraOptions(steps=1))
    with pytest.raises(WhetValueError, match=mentions("whet bench lora:", "smollm2 is 'none'", "no such file")):
        suite.tables(suite.LoraOptions(smollm2="none"))
    with pytest.raises(WhetValueError, match=mentions("whet bench lora-learning:", "steps is 0", "at least 1")):
        lora_learning.tables(lora_learning.LearningOptions(steps=0))
