"""Memory of a process by owner, against sizes computed by hand; and limits of control groups."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from tests.processes import printed_by
from tests.tiny import tiny_llama

import whet
from whet import _core
from whet.algorithms import GRPO, Distill
from whet.errors import WhetError
from whet.memory import PARTS, memory_report
from whet.system.memory import available_bytes, control_groups, machine_bytes, resident_bytes

NARROW = "bf16" in _core.isa()
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is reported on Linux only")

# A model of 22 M parameters: large compared with allocations of libraries.
STEPS = """
import json, sys
import torch, transformers, whet
from tests.tiny import fours, tiny_llama, with_lora
from whet.algorithms.grpo import GRPO
from whet.system.memory import resident_bytes
from whet.models.sources.live import open_module
from whet.training.sizes import Lengths, run_memory
from whet.models.lora import LoraSettings, choose_adapted

lora = json.loads(sys.argv[1])
layers = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
prompts = [[5 + i, 6, 7, 8] * 10 for i in range(8)]
settings = dict(reward_fn=lambda completions: [float(c[0] % 7) for c in completions], group_size=4, max_new_tokens=20,
                max_tokens_per_step=1024)  # one pass

def adapted(model):
    return with_lora(model, r=8, target_modules=layers) if lora else model

GRPO(adapted(tiny_llama(max_position_embeddings=128, vocab_size=64)), **settings).train_step(prompts)
model = tiny_llama
sizes = dict(vocab_size=8192, hidden_size=384, intermediate_size=1024, num_hidden_layers=8, num_attention_heads=6,
             num_key_value_heads=2, max_position_embeddings=512, eos_token_id=None, tie_word_embeddings=True)
before = resident_bytes()
model = tiny_llama(**sizes)
source = open_module(model)
trainer = GRPO(adapted(model), **settings)
for _ in range(3):
    trainer.train_step(prompts)
adapters = choose_adapted(source, LoraSettings(8, layers)) if lora else None
predicted = run_memory(source, trainer.config, Lengths(40, 20), interpreter=before, adapters=adapters)
n_trained = sum(p.numel() for p in trainer.policy.trainable.values())
n_all = sum(p.numel() for p in trainer.model.parameters())
now, fullest = whet.memory_report(), trainer.memory.fullest
print(json.dumps({
    "before": before, "now": now.parts, "resident": now.resident, "fullest": fullest.parts,
    "predicted": predicted.at_peak(), "total": predicted.total, "n_trained": n_trained, "n_all": n_all,
    "peak": now.peak, "text": str(now),
    "sampler": trainer.engine.memory,
}))
"""


@pytest.mark.parametrize("lora", [False, True])
def test_memory_report_equals_counts_by_hand_and_the_prediction(lora):
    found = json.loads(printed_by(STEPS, json.dumps(lora)))
    now, resident = found["now"], found["resident"]
    assert now["weights"] == pytest.approx(4 * found["n_all"], rel=1e-3)
    assert now["moments"] == pytest.approx(8 * found["n_trained"], rel=1e-3)
    sampler = found["sampler"]
    assert now.get("sampler_weights", 0) == (sampler["weights_bytes"] + sampler["adapters_bytes"] if lora else 0)
    assert not {"kv_cache", "workspace", "activations", "gradients"} & set(now)
    # Unclaimed memory equals the memory of the process before the model was created.
    assert sum(now.values()) == resident
    assert now["interpreter"] == pytest.approx(found["before"], abs=0.05 * resident)
    assert PARTS["moments"] in found["text"] and "total" in found["text"]
    fullest, predicted = found["fullest"], found["predicted"]
    for part in ("weights", "moments", "sampler_weights", "copies"):
        assert predicted.get(part, 0) == pytest.approx(fullest.get(part, 0), rel=0.01), part
    # The head's backward pass allocates its gradient, logits, and gradients of hidden states: 8 x 4 x 20 tokens.
    assert "gradients" not in fullest and predicted["gradients"] == 4 * (found["n_trained"] if lora else 8192 * 384)
    head = 640 * (2048 * (6 if NARROW else 4) + (8 if NARROW else 4) * 384)
    assert predicted["activations"] - head == pytest.approx(fullest["activations"], rel=0.1)
    assert found["total"] == pytest.approx(found["peak"], rel=0.1)


def test_memory_of_a_process_without_a_model_is_its_libraries():
    parts = json.loads(printed_by("import json, whet; print(json.dumps(whet.memory_report().parts))"))
    assert set(parts) <= {"interpreter", "allocator"} and parts["interpreter"] > 1e7


def test_memory_of_an_engine_is_reported_while_it_is_open():
    before = memory_report().parts.get("sampler_weights", 0)
    from tests.engine.tiny_models import tiny_model

    with whet.Engine.from_model(tiny_model("llama")) as engine:
        weights_bytes = memory_report().parts["sampler_weights"] - before
        assert weights_bytes == engine.memory["weights_bytes"]
    assert memory_report().parts.get("sampler_weights", 0) == before


def test_available_memory_is_at_most_the_machines():
    assert resident_bytes() < available_bytes() <= machine_bytes()


def write_group(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (folder / name.replace("__", ".")).write_text(f"{value}\n")


def test_control_groups_of_version_2_include_ancestors(tmp_path):
    groups = tmp_path / "sys/fs/cgroup"
    write_group(tmp_path / "proc/self", cgroup="0::/user/job")
    stat = {"memory__stat": "anon 1\ninactive_file 300"}
    write_group(groups / "user", memory__max=5000, memory__current=2000, **stat)
    write_group(groups / "user/job", memory__max="max", memory__current=1500, **stat)
    assert list(control_groups(tmp_path)) == [(5000, 1700)]
    (groups / "user/job/memory.max").write_text("4000\n")
    assert list(control_groups(tmp_path)) == [(4000, 1200), (5000, 1700)]


def test_control_groups_of_version_1_and_of_a_container(tmp_path):
    write_group(tmp_path / "proc/self", cgroup="7:cpu,cpuacct:/x\n4:memory:/docker/1")
    group = tmp_path / "sys/fs/cgroup/memory"
    values = {"memory__usage_in_bytes": 900, "memory__stat": "cache 7\ntotal_inactive_file 100"}
    write_group(group, memory__limit_in_bytes=9223372036854771712, **values)
    assert list(control_groups(tmp_path)) == []
    write_group(group, memory__limit_in_bytes=2000)  # the path is the host's, which does not exist here
    assert list(control_groups(tmp_path)) == [(2000, 800)]
    assert list(control_groups(tmp_path / "nowhere")) == []


def test_memory_report_after_a_trainer_that_was_not_constructed():
    """The trainer lives as long as the error, whose traceback refers to it."""
    failures = [
        (GRPO, {"reward_fn": None}),
        (GRPO, {"engine": "none"}),
        (Distill, {"teacher": tiny_llama(), "divergence": "full"}),
    ]
    for method, arguments in failures:
        with pytest.raises(WhetError) as caught:
            method(tiny_llama(), **arguments)
        assert caught.tb is not None and memory_report().resident > 0
