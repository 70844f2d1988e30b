"""LoRA's family: ranks by pattern, PiSSA, DoRA, trained tokens and whole matrices, each against PEFT."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from tests.engine.tiny_models import logits_of, naive_logits, tiny_model, token_ids
from tests.models.test_export import N_ROWS, tokenizer  # noqa: F401
from tests.models.test_export import save as save_with_tokenizer
from tests.raising import assert_raises
from tests.tiny import assert_resumes, make_trainer, tiny_llama, with_lora

from whet import Engine, Learner
from whet.algorithms.dpo import DPO
from whet.algorithms.sft import SFT
from whet.errors import CheckpointError, WhetValueError
from whet.models.export import export_gguf, read_adapters
from whet.models.export_adapters import export_adapters
from whet.models.lora import LoraSettings, choose_adapted
from whet.models.packed_base import pack_base
from whet.models.pissa import is_zero, principal_factors
from whet.models.sources.gguf import open_gguf
from whet.models.sources.live import open_module
from whet.models.sources.pretrained import open_pretrained
from whet.runs.models import add_adapters
from whet.runs.settings import SFTRun
from whet.text.model import load_engine

PROMPTS, COMPLETIONS = [[5, 6], [7]], [[4, 8, 2], [9, 3]]
ROWS = list(zip(PROMPTS, COMPLETIONS, strict=True))
IDS = [5, 6, 4, 8, 7, 9, 3, 2]
PATTERNS = {
    "rank_pattern": {"q_proj": 3, "layers.1.*down_proj": 2},
    "alpha_pattern": {"k_proj": 5.0, "layers.0.mlp.up_proj": 9.0},
}


def learner_of(model, **settings):
    return Learner(pack_base(open_module(model), weights="float32"), compute="float32", **settings)


def logprobs_of(model):
    with torch.no_grad():
        logits = model(torch.tensor([IDS])).logits[0, :-1].double()
    return logits.log_softmax(-1).gather(-1, torch.tensor(IDS[1:])[:, None])[:, 0].numpy()


def run_of(**settings):
    return SFTRun(**{"lora_rank": 4, "lora_alpha": 8, **settings})


# --- ranks by pattern -------------------------------------------------------------------------------------


@pytest.mark.parametrize("use_rslora", [False, True])
def test_ranks_and_alphas_by_pattern_are_pefts(use_rslora, tmp_path):
    from peft import PeftModel

    given = {**PATTERNS, "use_rslora": use_rslora}
    theirs = with_lora(tiny_llama(), r=4, lora_alpha=8, target_modules="all-linear", **given)
    learner = learner_of(tiny_llama(), lora_rank=4, lora_alpha=8, **given)
    learner.adapters[0].b[:] = 0.1
    learner.update()
    learner.save_pretrained(tmp_path)
    read = PeftModel.from_pretrained(tiny_llama(), tmp_path)
    modules = add_adapters(tiny_llama(), run_of(**given))
    shapes = set()
    for adapter in learner.adapters:
        name = f"base_model.model.{adapter.name}"
        expected = theirs.get_submodule(name)
        shapes.add((adapter.rank, adapter.scaling))
        assert adapter.rank == expected.r["default"] and adapter.scaling == pytest.approx(expected.scaling["default"])
        for model in (read, modules):
            own = model.get_submodule(name)
            assert own.r["default"] == adapter.rank and own.scaling["default"] == pytest.approx(adapter.scaling)
    assert len(shapes) == 5
    found = learner.logprobs([IDS[:1]], [IDS[1:]]).logprobs[0]
    np.testing.assert_allclose(found, logprobs_of(read), rtol=0, atol=1e-5)
    with Engine.from_pretrained(save(tiny_llama(), tmp_path / "base"), weights="float32") as engine:
        number = engine.add_adapter(tmp_path)
        np.testing.assert_allclose(engine.logprobs([IDS], start=1, adapter=number)[0], found, rtol=0, atol=1e-5)
    chosen = choose_adapted(open_module(tiny_llama()), LoraSettings(4, rank_pattern=PATTERNS["rank_pattern"]))
    assert chosen.n_parameters == sum(p.numel() for p in theirs.parameters() if p.requires_grad)


def test_patterns_without_a_layer_are_rejected():
    for name in ("rank_pattern", "alpha_pattern"):
        assert_raises(WhetValueError, (name, "'proj'", "q_proj"), learner_of, tiny_llama(), **{name: {"proj": 2}})
        assert_raises(WhetValueError, (name, "'*'", "regular"), learner_of, tiny_llama(), **{name: {"*": 2}})
        facts = (name, "lora_rank is 0")
        assert_raises(WhetValueError, facts, SFTRun(**{name: {"q_proj": 2}}).check_adapters)
    assert_raises(WhetValueError, ("rank_pattern", "ranks >= 1"), SFTRun, rank_pattern={"q_proj": 0})


# --- PiSSA ------------------------------------------------------------------------------------------------


def test_principal_factors_are_the_largest_singular_components():
    rng = np.random.default_rng(0)
    matrix = rng.standard_normal((40, 24)).astype(np.float32)
    u, values, vt = np.linalg.svd(matrix.astype(np.float64), full_matrices=False)
    a, b = principal_factors(matrix, 5, 2.0, np.random.default_rng(1))
    assert a.shape == (5, 24) and b.shape == (40, 5) and a.dtype == b.dtype == np.float32
    np.testing.assert_allclose(2.0 * b @ a, (u[:, :5] * values[:5]) @ vt[:5], rtol=0, atol=1e-4)
    np.testing.assert_allclose(np.linalg.norm(a, axis=1), np.sqrt(values[:5] / 2), rtol=1e-4)
    # By hand: of diag(3, 1) the component 3, so that A = (sqrt 3, 0) and B = (sqrt 3, 0)^T up to a sign.
    a, b = principal_factors(np.diag([3.0, 1.0]).astype(np.float32), 1, 1.0, rng)
    np.testing.assert_allclose(np.abs(a), [[3**0.5, 0]], atol=1e-5)
    np.testing.assert_allclose(b @ a, [[3, 0], [0, 0]], atol=1e-5)


def test_steps_of_pissa_are_pefts_on_its_residual(tmp_path):
    """AdamW's steps do not depend on the signs of singular vectors. The result is plain LoRA on the unchanged base."""
    from peft import PeftModel

    settings = {"lora_rank": 4, "lora_alpha": 8, "lora_init": "pissa"}
    theirs = with_lora(tiny_llama(), r=4, lora_alpha=8, target_modules="all-linear", init_lora_weights="pissa")
    learner = learner_of(tiny_llama(), **settings)
    modules = add_adapters(tiny_llama(), run_of(lora_init="pissa"))
    assert [a.rank for a in learner.adapters] == [8] * 14 and all(a.is_original() for a in learner.adapters)
    runs = [make_trainer(SFT, model, learning_rate=1e-3) for model in (theirs, learner, modules)]
    steps = [[run.train_step(ROWS) for _ in range(4)] for run in runs]
    first = make_trainer(SFT, tiny_llama(), learning_rate=0.0).train_step(ROWS)["loss"]
    for name in ("loss", "grad_norm"):
        for step in zip(*steps, strict=True):
            assert [each[name] for each in step] == pytest.approx([step[0][name]] * 3, rel=1e-3)
    assert [each[0]["loss"] for each in steps] == pytest.approx([first] * 3, rel=1e-5)
    learner.save_pretrained(tmp_path)
    read = PeftModel.from_pretrained(tiny_llama(), tmp_path)
    modules.save_pretrained(tmp_path / "modules")
    with_peft = PeftModel.from_pretrained(tiny_llama(), tmp_path / "modules")
    for model in (read, with_peft):
        assert model.peft_config["default"].r == 8
        np.testing.assert_allclose(logprobs_of(model), logprobs_of(theirs), rtol=0, atol=2e-4)
    np.testing.assert_allclose(learner.logprobs([IDS[:1]], [IDS[1:]]).logprobs[0], logprobs_of(read), rtol=0, atol=1e-5)


@pytest.mark.parametrize("use_rslora", [False, True])
def test_the_second_half_does_not_train(use_rslora, tmp_path):
    given = {"lora_rank": 3, "lora_init": "pissa", "use_rslora": use_rslora, "rank_pattern": {"q_proj": 2}}

    def make(model=None, **settings):
        given_model = learner_of(tiny_llama(), **given) if model is None else model
        return make_trainer(SFT, given_model, learning_rate=1e-2, batch_size=2, **settings)

    run = make(weight_decay=0.1)
    before = [(each.a.copy(), each.b.copy()) for each in run.model.adapters]
    run.train(ROWS, 3)
    for each, (a, b) in zip(run.model.adapters, before, strict=True):
        half = each.rank // 2
        assert each.rank == (4 if each.name.endswith("q_proj") else 6)
        assert np.array_equal(each.a[half:], a[half:]) and np.array_equal(each.b[half:], b[half:])
        assert not np.array_equal(each.b[:half], b[:half]) and not each.is_original()
    assert_resumes(lambda: make(weight_decay=0.1), ROWS, tmp_path)
    modules = make(add_adapters(tiny_llama(), run_of(**given)))
    named = {name: p.detach().clone() for name, p in modules.model.named_parameters() if "lora_" in name}
    modules.train(ROWS, 3)
    for name, p in modules.model.named_parameters():
        if ".lora_A." in name:
            assert torch.equal(p[len(p) // 2 :], named[name][len(p) // 2 :]) and not torch.equal(p, named[name])


def test_the_reference_of_new_pissa_adapters_is_the_base(tmp_path):
    pairs = [{"prompt": p, "chosen": c, "rejected": [3, 2]} for p, c in ROWS]
    for model in (
        learner_of(tiny_llama(), lora_init="pissa", lora_rank=4),
        add_adapters(tiny_llama(), run_of(lora_init="pissa")),
    ):
        run = DPO(model, learning_rate=1e-2, compute="float32", batch_size=2)
        assert run.policy.reference.adapters_off and run.train(pairs, 1)["loss"] == pytest.approx(np.log(2), rel=1e-5)
    a, b = np.ones((2, 3), np.float32), np.array([[1, -1]], np.float32)
    assert is_zero(a, b) and not is_zero(a, np.abs(b)) and is_zero(a, 0 * b) and not is_zero(a[:1], b[:, :1])


def test_what_pissa_does_not_support_is_named():
    assert_raises(
        WhetValueError,
        ("'pissa'", "lora_alpha", "-0.25"),
        learner_of,
        tiny_llama(),
        lora_init="pissa",
        lora_rank=4,
        lora_alpha=-1,
    )
    assert_raises(WhetValueError, ("lora_init", "'olora'"), learner_of, tiny_llama(), lora_init="olora")
    facts = ("lora_rank is 12", "k_proj is 8 x 16", "at most 8")
    assert_raises(WhetValueError, facts, learner_of, tiny_llama(), lora_init="pissa", lora_rank=12)
    facts = ("weight_decay is 0.1", "pissa", "native")
    assert_raises(WhetValueError, facts, add_adapters, tiny_llama(), run_of(lora_init="pissa", weight_decay=0.1))
    facts = ("lora_init", "'pissa'", "use_dora")
    assert_raises(WhetValueError, facts, run_of(lora_init="pissa", use_dora=True).check_adapters)


# --- more than factors: merged when an engine loads them --------------------------------------------------


def save(model, folder):
    model.save_pretrained(folder)
    return folder


KINDS = {
    "dora": {"use_dora": True, "lora_layers": ["q_proj", "down_proj"]},
    "dora of the head": {"use_dora": True, "lora_layers": ["v_proj", "lm_head"]},
    "tokens": {"trainable_token_indices": [9, 4, 5]},
    "dora and tokens": {"use_dora": True, "trainable_token_indices": [9, 4]},
    "embedding": {"modules_to_save": ["embed_tokens"]},
    "head": {"modules_to_save": ["lm_head"], "lora_layers": ["o_proj"]},
    "norms and both": {"modules_to_save": ["norm", "embed_tokens", "lm_head"]},
}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore")  # PEFT's of tied weights
def test_engines_run_what_was_trained(kind, tied, tmp_path):
    """Trained on Whet's kernels, as torch trains it; saved as PEFT reads it; merged by engines, live and from files."""
    from peft import PeftModel

    base = tiny_llama(tie_word_embeddings=tied)
    base.get_input_embeddings().weight.data[0] = 0.01  # DoRA divides by the length of a row
    folder = save(base, tmp_path / "base")

    def adapted():
        torch.manual_seed(0)
        return add_adapters(copy.deepcopy(base), run_of(**KINDS[kind]))

    on_kernels = "head" not in kind and "both" not in kind and not (tied and "tokens" in kind)  # else torch
    run, torchs = (
        make_trainer(SFT, adapted(), batch_size=2, learning_rate=0.05, compute=compute)
        for compute in ("float32" if on_kernels else "torch", "torch")
    )
    steps = [[each.train_step(ROWS) for _ in range(3)] for each in (run, torchs)]
    for name in ("loss", "grad_norm"):
        assert [step[name] for step in steps[0]] == pytest.approx([step[name] for step in steps[1]], rel=2e-3)
    assert run.policy.n_trained == choose_adapted(open_module(base), run_of(**KINDS[kind]).lora_settings()).n_parameters
    model = run.model.eval()
    expected = logprobs_of(model)
    assert np.abs(expected - logprobs_of(base)).max() > 0.01
    run.save_pretrained(tmp_path / "adapter")
    read = PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / "adapter")
    np.testing.assert_allclose(logprobs_of(read), expected, rtol=0, atol=1e-5)
    adapter = str(tmp_path / "adapter")
    with load_engine(str(folder), "float32", None, "test", adapter) as engine:
        number = engine.add_adapter(adapter)
        np.testing.assert_allclose(engine.logprobs([IDS], start=1, adapter=number)[0], expected, rtol=0, atol=1e-4)
    with Engine.from_model(model, merge_adapters=True, weights="float32") as engine:
        np.testing.assert_allclose(engine.logprobs([IDS], start=1)[0], expected, rtol=0, atol=1e-4)
        run.train_step(ROWS)
        engine.sync(run.model.eval())
        np.testing.assert_allclose(engine.logprobs([IDS], start=1)[0], logprobs_of(run.model), rtol=0, atol=1e-4)
    if kind == "dora":
        learner = Learner(str(folder), adapter=adapter, weights="float32", compute="float32")
        own = learner.logprobs([IDS[:1]], [IDS[1:]]).logprobs[0]
        np.testing.assert_allclose(own, expected, rtol=0, atol=1e-4)
    else:
        facts = ("Learner", "torch")
        assert_raises(WhetValueError, facts, Learner, str(folder), adapter=adapter, weights="float32")


@pytest.mark.parametrize("kind", ["dora and tokens", "norms and both"])
@pytest.mark.filterwarnings("ignore")  # PEFT's of tied weights
def test_exported_files_have_them_merged(kind, tokenizer, tmp_path):  # noqa: F811
    base = tiny_model("llama", vocab_size=N_ROWS)
    folder = save_with_tokenizer(base, tokenizer, tmp_path / "model")
    run = make_trainer(
        SFT, add_adapters(copy.deepcopy(base), run_of(**KINDS[kind])), learning_rate=0.05, compute="torch"
    )
    run.train_step(ROWS)
    run.save_pretrained(tmp_path / "adapter")
    adapters, ids = read_adapters(tmp_path / "adapter", open_pretrained(folder), "test"), token_ids()
    export_gguf(folder, tmp_path / "merged.gguf", "f32", adapters=adapters)
    found = naive_logits(open_gguf(tmp_path / "merged.gguf"), ids)
    np.testing.assert_allclose(found, logits_of(run.model.eval(), ids), rtol=0, atol=1e-4)
    facts = ("export_adapters", "trained too", "--adapter-only")
    assert_raises(WhetValueError, facts, export_adapters, folder, tmp_path / "adapter.gguf", adapters)


def test_runs_of_these_kinds_resume(tmp_path):
    for i, kind in enumerate(("dora and tokens", "head")):

        def make(kind=kind):
            torch.manual_seed(0)
            return make_trainer(SFT, add_adapters(tiny_llama(), run_of(**KINDS[kind])), batch_size=2, compute="torch")

        assert_resumes(make, ROWS, tmp_path / str(i))


def test_settings_that_do_not_fit_are_named(tmp_path):
    source = open_module(tiny_llama())

    def choose(**settings):
        return choose_adapted(source, LoraSettings(2, **settings), "test")

    facts = ("trainable_token_indices", "[12]", "0 to 11")
    assert_raises(WhetValueError, facts, choose, trainable_token_indices=[12])
    assert_raises(WhetValueError, ("different",), choose, trainable_token_indices=[3, 3])
    facts = ("trainable_token_indices", "modules_to_save")
    assert_raises(WhetValueError, facts, choose, trainable_token_indices=[3], modules_to_save=["embed_tokens"])
    assert_raises(WhetValueError, ("use_dora", "embed_tokens"), choose, use_dora=True, lora_layers=["embed_tokens"])
    with_lora(tiny_llama(), target_modules=["q_proj"], lora_bias=True, b_std=0.1).save_pretrained(tmp_path / "biased")
    folder = str(save(tiny_llama(), tmp_path / "base"))
    with pytest.raises(CheckpointError, match="lora_bias"):
        load_engine(folder, "float32", None, "test", str(tmp_path / "biased"))
