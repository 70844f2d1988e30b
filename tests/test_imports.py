"""Packages that an import must not load: users pay only for the parts they use."""

import pytest
from tests.processes import printed_by
from tests.timed import timed

MODEL_CONFIG = """from whet.models import families, reference
from whet.models.sources import live
config = families.model_config({'model_type': 'gpt2', 'n_embd': 8, 'n_head': 2, 'n_layer': 1, 'vocab_size': 9})
assert config.slots()['layers.0.qkv'] == (24, 8)"""


@pytest.mark.parametrize(
    ("code", "absent"),
    [
        ("import whet", "torch transformers rich tyro"),
        ("import whet.cli", "tyro rich torch tomllib"),
        ("import whet.config", "torch"),
        ("import whet.training.phases, whet.losses, whet; whet.Learner, whet.Engine", "torch transformers safetensors"),
        ("import whet.data.rows, whet.rewards.functions", "torch transformers pyarrow"),
        ("import whet.evaluation, whet.models.published", "torch transformers tokenizers rich tyro"),
        ("import whet.training.loggers", "torch rich tensorboard wandb matplotlib typing_extensions"),
        ("import whet.models.tokenizers", "torch transformers tokenizers jinja2"),
        ("import whet.algorithms, whet.nn, whet.engine", "torch._dynamo transformers peft datasets"),
        (MODEL_CONFIG, "torch transformers peft"),
    ],
)
def test_import_does_not_load_unneeded_packages(code, absent):
    assert printed_by(f"{code}\nimport sys\nprint({set(absent.split())} & set(sys.modules))") == "set()\n"


@timed
def test_import_takes_a_tenth_of_a_second_at_most():
    """Processor time after NumPy's import: other load lengthens the elapsed time."""
    code = "import numpy, time; t = time.process_time(); import whet; print(time.process_time() - t)"
    assert float(printed_by(code)) <= 0.1
