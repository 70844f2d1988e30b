"""Division of a training step among threads, by the times of its tasks on one thread."""

from __future__ import annotations

import json

import pytest
import torch
from tests.processes import printed_by
from tests.tiny import make_trainer, tiny_llama
from tools.predict_cores import makespan, predict

from whet.algorithms.sft import SFT
from whet.errors import WhetTypeError, WhetValueError
from whet.ops.probe import trace_jobs


def test_threads_claim_tasks_in_order():
    assert makespan([3.0, 2.0, 1.0, 1.0], [1.0]) == 7.0
    assert makespan([3.0, 2.0, 1.0, 1.0], [1.0, 1.0]) == 4.0
    assert makespan([3.0, 3.0], [1.0, 0.5]) == 6.0
    assert makespan([], [1.0, 1.0]) == 0.0


def test_a_slow_thread_delays_a_training_step_little():
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "vocab_size": 8192, "max_position_embeddings": 512}
    model = tiny_llama(**sizes, num_attention_heads=8, num_key_value_heads=2, num_hidden_layers=2)
    trainer = make_trainer(SFT, model)
    torch.manual_seed(0)
    rows = [{"input_ids": torch.randint(4, 8192, (128,)).tolist()} for _ in range(4)]
    trainer.train_step(rows)
    # The minimum of several: other load lengthens single tasks.
    steps = [predict(trace_jobs(lambda: trainer.train_step(rows), 2), 2) for _ in range(5)]
    assert all(step.n_jobs > 2 * 20 for step in steps)
    assert min(step.slow_s / step.ideal_s for step in steps) <= 1.15
    assert min(step.parallel_s / step.even_s for step in steps) <= 1.1


SERIAL_SHARES = """
import json, torch
from tests.tiny import make_trainer, tiny_llama
from whet.algorithms.sft import SFT
from whet.learner import Learner
from whet.models.packed_base import pack_base
from whet.models.sources.live import open_module
from whet.ops.probe import trace_jobs

sizes = {"hidden_size": 512, "intermediate_size": 2048, "vocab_size": 8192, "max_position_embeddings": 512}
model = tiny_llama(**sizes, num_attention_heads=8, num_key_value_heads=2, num_hidden_layers=2)
trainer = make_trainer(SFT, Learner(pack_base(open_module(model)), lora_rank=8))
torch.manual_seed(0)
rows = [{"input_ids": torch.randint(4, 8192, (128,)).tolist()} for _ in range(16)]
trainer.train_step(rows)
traces = [trace_jobs(lambda: trainer.train_step(rows), 2) for _ in range(5)]
print(json.dumps([trace.serial_s / (trace.serial_s + sum(map(sum, trace.jobs))) for trace in traces]))
"""


def test_the_serial_part_of_a_learners_step_is_small():
    """Adapters of a module with wide layers: log-probs, gradients, and AdamW.

    In a separate process: the serial part is its processor time, to which threads of other tests would add.
    """
    shares = json.loads(printed_by(SERIAL_SHARES))
    assert min(shares) <= 0.04, shares


@pytest.mark.parametrize(
    ("threads", "error", "fact"),
    [(0, WhetValueError, "threads is 0"), (1025, WhetValueError, "at most 1024"), ("2", WhetTypeError, "threads")],
)
def test_an_unusable_number_of_threads_is_rejected(threads, error, fact):
    with pytest.raises(error, match=fact):
        trace_jobs(lambda: None, threads)


def test_the_trace_ends_with_an_error_of_the_call():
    with pytest.raises(ZeroDivisionError):
        trace_jobs(lambda: 1 / 0, 2)
    assert trace_jobs(lambda: None, 2).jobs == []
