"""``whet generate`` and ``whet info``, in process and as commands."""

import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import time

import gguf
import pytest
from tests.engine import tiny_models
from tests.gguf_files import F32, write_gguf
from tests.processes import WHET, run_python
from tests.raising import assert_mentions
from tests.tiny import with_lora

import whet
from whet.cli import main
from whet.engine import Engine


@pytest.fixture
def run(capsys):
    def run(*argv, status=0):
        capsys.readouterr()
        assert main([str(argument) for argument in argv]) == status
        return capsys.readouterr()

    return run


@pytest.fixture(scope="session")
def tokenizer(tiny_model):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_model)


def ids_of(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def test_output_equals_the_engines_samples(run, tiny_model, tokenizer):
    argv = ["generate", tiny_model, "--prompt", "Say é", "--max-new-tokens", "12", "--weights", "float32"]
    out, err = run(*argv, "--raw", "--seed", "3")
    sampling = whet.SamplingParams(max_new_tokens=12, seed=3, stop_token_ids=[1])
    with Engine.from_pretrained(tiny_model, weights="float32") as engine:
        [samples] = engine.generate([ids_of(tokenizer, "Say é")], 3, sampling)
        texts = [tokenizer.decode(s.token_ids, skip_special_tokens=True) for s in samples]
        chat = tokenizer.apply_chat_template([{"role": "user", "content": "Say é"}], tokenize=False)
        chat_ids = ids_of(tokenizer, chat + "<assistant>")
        [[greedy]] = engine.generate([chat_ids], 1, whet.SamplingParams(temperature=0, max_new_tokens=12))
    assert out == texts[0] + "\n"
    assert err.startswith(f"6 + {len(samples[0].token_ids)} tokens in ") and "tokens/s" in err and err.count("\n") == 1
    several = run(*argv, "--raw", "--seed", "3", "-n", "3")
    headed = [
        f"--- {i}/3 ({s.finish_reason})\n{text}\n" for i, (s, text) in enumerate(zip(samples, texts, strict=True), 1)
    ]
    assert several.out == "".join(headed) and "(3 samples)" in several.err
    chatted = run(*argv, "--temperature", "0")
    assert chatted.out == tokenizer.decode(greedy.token_ids, skip_special_tokens=True) + "\n"
    assert chatted.err.startswith(f"{len(chat_ids)} + 12 tokens") and "(length)" in chatted.err


def test_stop_strings_are_not_printed(run, tiny_model, tiny_gguf, tokenizer):
    argv = ["--prompt", "x", "--max-new-tokens", "60", "--weights", "float32", "--raw"]
    whole = run("generate", tiny_model, *argv, "--seed", "1").out[:-1]
    at = next(i for i in range(5, len(whole)) if whole[i : i + 2].isascii() and whole.index(whole[i : i + 2]) == i)
    stop = ["--stop", "never seen", whole[at : at + 2]]
    for model in (tiny_model, tiny_gguf):
        free = run("generate", model, *argv, "--seed", "1").out[:-1]
        out, err = run("generate", model, *argv, "--seed", "1", *stop)
        assert out == free[: free.index(stop[2])] + "\n" and "(stop)" in err
    several = run("generate", tiny_model, *argv, "--seed", "1", *stop, "-n", "3").out
    assert several.startswith(f"--- 1/3 (stop)\n{whole[:at]}\n--- 2/3 (") and stop[2] not in several
    # A prefix of a stop string is withheld, and printed if the completion ends without it.
    ids = ids_of(tokenizer, "xyz")
    bias = ["--logit-bias", str(ids[0]), "100", "--max-new-tokens", "3"]
    assert run("generate", tiny_model, *argv, *bias, "--stop", "xxxx").out == "xxx\n"
    assert run("generate", tiny_model, *argv, *bias, "--stop", "xx", "--min-new-tokens", "2").out == "x\n"
    assert run("generate", tiny_model, *argv, *bias, "--stop", "xx").out == "\n"


def test_top_logprobs_are_listed(run, tiny_model, tokenizer):
    argv = ["generate", tiny_model, "--prompt", "x", "--max-new-tokens", "4", "--temperature", "0", "--raw"]
    out, err = run(*argv, "--top-logprobs", "2")
    assert out == run(*argv).out
    lines = err.splitlines()
    assert len(lines) == 5 and lines[-1].startswith("1 + 4 tokens")
    token, first, second = re.fullmatch(r"('.*?' -\d\.\d{3}): ('.*' -\d\.\d{3}), ('.*' -\d\.\d{3})", lines[0]).groups()
    assert token == first and float(first.split()[-1]) > float(second.split()[-1])
    several = run(*argv[:-3], "--raw", "--top-logprobs", "1", "-n", "2")
    assert several.err.count(": ") == several.err.count("\n") - 1


def test_penalties_change_the_output(run, tiny_model):
    argv = ["generate", tiny_model, "--prompt", "x", "--max-new-tokens", "30", "--temperature", "0", "--raw"]
    plain = run(*argv).out
    for flags in (["--presence-penalty", "2"], ["--frequency-penalty", "1"]):
        assert run(*argv, *flags).out != plain


def test_longrope_factors_of_short_texts_equal_transformers(run, tiny_model, tokenizer, tmp_path):
    import torch
    from transformers import Phi3Config, Phi3ForCausalLM

    factors = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 4.0, 8.0, 16.0]}
    torch.manual_seed(0)
    config = Phi3Config(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=256, original_max_position_embeddings=64, eos_token_id=1, pad_token_id=0,
        bos_token_id=None, initializer_range=0.3,
        rope_parameters={"rope_type": "longrope", "rope_theta": 1e4, **factors},
    )  # fmt: skip
    model = Phi3ForCausalLM(config).eval()
    model.save_pretrained(tmp_path)
    prompt_ids = ids_of(tokenizer, "a longer text, so that angles differ")
    argv = [
        "generate",
        tmp_path,
        "--tokenizer",
        tiny_model,
        "--prompt",
        "a longer text, so that angles differ",
        "--raw",
    ]
    out = run(*argv, "--weights", "float32", "--temperature", "0", "--max-new-tokens", "20").out
    greedy = model.generate(torch.tensor([prompt_ids]), max_new_tokens=20, do_sample=False)[0, len(prompt_ids) :]
    assert out == tokenizer.decode(greedy, skip_special_tokens=True) + "\n"
    assert len(prompt_ids) + 20 <= 64  # a sequence that may exceed it uses the long factors throughout
    longer = run(*argv, "--weights", "float32", "--temperature", "0", "--max-new-tokens", "40").out
    with Engine.from_pretrained(tmp_path, weights="float32") as engine:
        sampling = whet.SamplingParams(temperature=0, max_new_tokens=40, stop_token_ids=[1])
        [[expected]] = engine.generate([prompt_ids], 1, sampling)
    assert longer == tokenizer.decode(expected.token_ids, skip_special_tokens=True) + "\n"


def test_gguf_file_is_self_contained(run, tiny_model, tiny_gguf, tmp_path):
    """Its text is its original folder's: with chat template, without, and with another tokenizer."""
    argv = ["--prompt", "Say é", "--temperature", "0", "--max-new-tokens", "8", "--weights", "float32"]
    expected = run("generate", tiny_model, *argv)
    found = run("generate", tiny_gguf, *argv)
    assert found.out == expected.out and found.err.split()[:3] == expected.err.split()[:3]
    assert run("generate", tiny_gguf, "--tokenizer", tiny_model, *argv).out == expected.out
    assert run("generate", tiny_model, "--tokenizer", tiny_gguf, *argv).out == expected.out
    raw = run("generate", tiny_gguf, *argv, "--raw")
    assert raw.out == run("generate", tiny_model, *argv, "--raw").out != expected.out
    # The file's EOS ends the text: here the first token.
    with Engine.from_pretrained(tiny_gguf, weights="float32") as engine:
        [[first]] = engine.generate([[50]], 1, whet.SamplingParams(temperature=0, max_new_tokens=1))
    data = tiny_gguf.read_bytes()
    key = b"tokenizer.ggml.eos_token_id" + (4).to_bytes(4, "little")
    early_eos = tmp_path / "early_eos.gguf"
    early_eos.write_bytes(data.replace(key + (1).to_bytes(4, "little"), key + first.token_ids[0].to_bytes(4, "little")))
    from whet.models.tokenizers import read_tokenizer

    text = read_tokenizer(tiny_gguf).decode([50])
    out = run("generate", early_eos, *argv[2:], "--prompt", text, "--raw")
    assert out.out == "\n" and out.err.startswith("1 + 1 tokens") and "(stop)" in out.err


def test_a_draft_model_changes_no_text(run, tiny_model, tiny_gguf, tmp_path, error_of):
    settings = ["--prompt", "Say é", "--max-new-tokens", "40", "--weights", "float32"]
    for model in (tiny_model, tiny_gguf):
        argv = ["generate", model, *settings]
        assert run(*argv, "--draft", model).out == run(*argv).out
    for flags, parts in (
        (["--draft", tiny_model], ("draft model", "another tokenizer", "token 257", "'qz' for the model")),
        (["--draft", tmp_path / "no.gguf"], ("draft", "no.gguf", "does not exist")),
        (["--draft", tiny_gguf, "--presence-penalty", "1"], ("draft", "no effect", "presence_penalty", "one by one")),
        (["--draft", tiny_gguf, "--regex", "a*"], ("draft", "no effect", "regex", "one by one")),
    ):
        assert_mentions(error_of(*argv, *flags), *parts)


def test_generate_of_a_gguf_file_imports_neither_torch_nor_transformers(tiny_gguf):
    code = "import sys; from whet.cli import main; "
    code += f"main(['generate', {str(tiny_gguf)!r}, '--prompt', 'x', '--max-new-tokens', '2']); "
    code += "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    run = run_python(code)
    assert run.returncode == 0 and run.stdout.endswith("[]\n"), run


def test_gguf_file_without_a_tokenizer(run, tiny_model, tmp_path, error_of):
    from transformers import AutoModelForCausalLM

    path = write_gguf(AutoModelForCausalLM.from_pretrained(tiny_model), tmp_path / "tiny.gguf")
    argv = ["--prompt", "x", "--temperature", "0", "--max-new-tokens", "8", "--weights", "float32", "--raw"]
    assert run("generate", path, "--tokenizer", tiny_model, *argv).out == run("generate", tiny_model, *argv).out
    error = error_of("generate", path, *argv)
    assert_mentions(error, "tokenizer.ggml.model is None", "--tokenizer")
    found = json.loads(run("info", path, "--json").out)
    assert found["architecture"] == "llama" and found["weights_bytes"]["as stored"] == found["weights_bytes"]["bf16"]
    assert "tokenizer.ggml.model is None" in found["tokenizer"]["reason"]
    assert "Tokenizer: unreadable. " in run("info", path).out


def test_info_lists_tensor_types_and_tokenizer_of_a_gguf_file(run, tiny_gguf, tmp_path):
    from tests.engine.tiny_models import tiny_model

    found = json.loads(run("info", tiny_gguf, "--json").out)
    assert found["files"] == [str(tiny_gguf)] and found["tokenizer"] == {
        "kind": "byte-level BPE", "n_tokens": 258, "chat_template": True, "stop_tokens": {"<eos>": 1},
    }  # fmt: skip
    out = run("info", tiny_gguf).out
    assert "byte-level BPE, 258 tokens, with a chat template; stop tokens: <eos> (1)." in out
    kinds = {"up_proj": "Q2_K", "gate_proj": "IQ4_XS", "down_proj": "Q3_K", "o_proj": "Q5_K", "embed": "BF16"}
    model = tiny_model("llama", num_hidden_layers=1, hidden_size=256, intermediate_size=256)
    path = write_gguf(
        model, tmp_path / "m.gguf",
        lambda name: next((gguf.GGMLQuantizationType[kind] for part, kind in kinds.items() if part in name), F32),
        split_max_tensors=8,
    )  # fmt: skip
    found = json.loads(run("info", path, "--json").out)
    assert [file.rpartition("m-")[2] for file in found["files"]] == ["00001-of-00002.gguf", "00002-of-00002.gguf"]
    types = {name: (row["becomes"], row["bound"]) for name, row in found["tensors"].items()}
    assert types == {
        "BF16": (["bf16"], ""), "F32": (["bf16", "float32"], ""), "Q3_K": (["q6_k"], ""), "Q5_K": (["q5_k"], ""),
        "Q2_K": (["q8_0"], "within 1/254 of the largest of 32 weights and 2^-11 of each"),
        "IQ4_XS": (["q8_0"], "within 2^-11 of each weight"),
    }  # fmt: skip
    assert found["tensors"]["Q2_K"] == {**found["tensors"]["Q2_K"], "n": 1, "size_bytes": 256 * 84}
    out = run("info", path).out
    assert "Tensors in 2 files" in out and "q8_0, within 2^-11 of each weight" in out and "bf16 or float32" in out


def test_adapters(run, tiny_model, tmp_path):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    with_lora(model, b_std=3.0, r=2, target_modules=["q_proj"]).save_pretrained(tmp_path / "lora")
    argv = ["generate", tiny_model, "--prompt", "x", "--max-new-tokens", "16", "--raw"]
    assert run(*argv, "--adapter", tmp_path / "lora").out != run(*argv).out


def test_custom_chat_template(run, tiny_model, tiny_gguf, tokenizer, tmp_path, error_of):
    path = tmp_path / "template.jinja"
    path.write_text("{% for m in messages %}{{ m.content }}!{% endfor %}")
    argv = ["--temperature", "0", "--max-new-tokens", "8", "--weights", "float32"]
    expected = run("generate", tiny_model, "--prompt", "Hi!", "--raw", *argv).out
    for model in (tiny_model, tiny_gguf):
        assert run("generate", model, "--prompt", "Hi", "--chat-template", path, *argv).out == expected
    error = error_of("generate", tiny_model, "--prompt", "Hi", "--raw", "--chat-template", path)
    assert_mentions(error, "chat_template", "no effect", "raw")


def test_generate_errors_are_one_line(tiny_model, tmp_path, error_of):
    assert_mentions(error_of("generate", "nope", "--prompt", "x"), "'nope'", "folder", ".gguf")
    for flags, facts in (
        (["--tokenizer", "nope"], ("'nope'", "folder", "file")),
        (["-n", "0"], ("n is 0", ">= 1")),
        (["--temperature", "-1"], ("temperature is -1.0",)),
        (["--stop", ""], ("stop is ['']", "64")),
        (["--presence-penalty", "3"], ("presence_penalty is 3.0", "-2 to 2")),
        (["--logit-bias", "5", "101"], ("logit_bias is {5: 101.0}", "-100 to 100")),
        (["--logit-bias", "258", "1"], ("logit_bias", "258", "257")),
        (["--min-new-tokens", "300"], ("min_new_tokens is 300", "max_new_tokens=256")),
        (["--top-logprobs", "21"], ("top_logprobs is 21", "0 to 20")),
        (["--temperature", "0", "-n", "2"], ("n is 2", "no effect", "temperature is 0")),
        (["--temperature", "0", "--top-k", "2"], ("top_k is 2", "no effect", "temperature is 0")),
    ):
        assert_mentions(error_of("generate", tiny_model, "--prompt", "x", *flags), *facts)
    folder = tmp_path / "other"
    shutil.copytree(tiny_model, folder)
    config = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps({**config, "eos_token_id": [1, 500]}))
    error = error_of("generate", folder, "--prompt", "x", "--raw")
    assert_mentions(error, "EOS is token 500", "generation_config.json", "vocabulary of 258", "--tokenizer")
    assert_mentions(error_of("generate", tiny_model, "--prompt", "", "--raw"), "prompt", "empty")
    assert_mentions(error_of("generate", tiny_model, "--prompt", "x" * 600, "--raw"), "600", "512")
    (tmp_path / "config.json").write_text((tiny_model / "config.json").read_text())
    assert_mentions(error_of("generate", tmp_path, "--prompt", "x"), tmp_path, "tokenizer")
    error = error_of("generate", tmp_path, "--prompt", "x", "--tokenizer", tiny_model)
    assert_mentions(error, tmp_path, "model.safetensors")
    with pytest.raises(SystemExit) as exit_:
        main(["generate", str(tiny_model)])  # no prompt
    assert exit_.value.code == 2


def test_info_prints_architecture_and_memory(run, tiny_model):
    out = run("info", tiny_model).out
    # Embedding 258 x 32; per layer q, k, v, o 32 x (32 + 16 + 16 + 32), MLP 3 x 32 x 64, norms 2 x 32; norm 32.
    n = 258 * 32 + 2 * (32 * 96 + 3 * 32 * 64 + 64) + 32
    assert f"{n:,} parameters: 2 layers, hidden 32, 4 heads of 8 (2 KV heads)" in out
    assert f"Native engine, on {whet.isa()} with {whet.get_num_threads()} threads: supported." in out
    assert "vocabulary 258 (tied), 512 positions." in out
    found = json.loads(run("info", tiny_model, "--json").out)
    assert found["architecture"] == "llama" and found["supported"] and found["n_parameters"] == n
    # 5 norms of 32 stay float32; the vocabulary is packed in whole panels of 16 rows.
    assert found["weights_bytes"]["float32"] == 4 * (n + 14 * 32)
    assert found["weights_bytes"]["bf16"] == 2 * (n + 14 * 32) + 2 * 160
    # 2 layers, 2 heads, a key of 8 and a value of 8, padded to a vector of 16.
    # In q8 also 4 bytes of bits, and two scales.
    heads = 2 * 2
    sizes = {"float32": heads * (8 + 16) * 4, "bf16": heads * (8 + 16) * 2, "q8": heads * (8 + 4 + 16 + 4)}
    assert found["kv_bytes_per_token"] == sizes
    for weights, n_bytes in found["weights_bytes"].items():
        with Engine.from_pretrained(tiny_model, weights=weights) as engine:
            assert engine.memory["weights_bytes"] == n_bytes


def test_info_counts_layers_without_attention(run, tmp_path):
    out = run("info", write_gguf(tiny_models.tiny_model("lfm2"), tmp_path / "model.gguf")).out
    assert "lfm2" in out and "4 layers (3 of them convolutions), hidden 32" in out
    out = run("info", write_gguf(tiny_models.tiny_model("qwen3_5_text"), tmp_path / "model.gguf")).out
    assert "qwen35" in out and "3 layers (2 of them gated delta rules), hidden 32, 4 gated heads of 12" in out


def test_info_counts_experts(run, tmp_path):
    model = tiny_models.tiny_model("lfm2_moe")
    model.save_pretrained(tmp_path / "model")
    out = run("info", tmp_path / "model").out
    total = sum(p.numel() for p in model.parameters()) + 3 * 6
    assert f"{total:,} parameters, {total - 3 * 2 * 3 * 32 * 14:,} of them active: 4 layers" in out
    assert "4 of 6 experts of 14 (silu, gated), in 1 of the layers MLP 40, vocabulary 48" in out


def test_info_prints_why_a_model_is_unsupported(run, tmp_path, error_of):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    out = run("info", tmp_path).out
    assert "mamba" in out and "not supported." in out
    found = json.loads(run("info", tmp_path, "--json").out)
    assert found["supported"] is False and "mamba" in found["reason"] and "config" not in found
    assert_mentions(error_of("info", "nope"), "'nope'", ".gguf")
    (tmp_path / "config.json").write_text("{")
    assert "config.json" in error_of("info", tmp_path)
    (tmp_path / "file.gguf").write_bytes(b"GGU")
    assert "file.gguf" in error_of("info", tmp_path / "file.gguf")


def test_commands_and_help_in_a_process(tiny_model):
    run = run_python(WHET[-1], "generate", tiny_model, "--prompt", "x", "--max-new-tokens", "3", "-n", "2")
    assert run.returncode == 0 and run.stdout.startswith("--- 1/2") and "tokens/s" in run.stderr
    run = run_python(WHET[-1], "info", "--help")
    assert run.returncode == 0 and "usage: whet info" in run.stdout
    run = run_python(WHET[-1], "info", tiny_model)
    assert run.returncode == 0 and ": supported." in run.stdout and run.stderr == ""


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_ctrl_c_ends_generate_with_one_line(tmp_path, tiny_model):
    """The text so far is printed, with one line of error and status 130."""
    import shutil

    model = tmp_path / "model"
    shutil.copytree(tiny_model, model)
    config = json.loads((model / "config.json").read_text())
    config["max_position_embeddings"] = 1_000_000
    (model / "config.json").write_text(json.dumps(config))
    argv = [*WHET, "generate", str(model), "--prompt", "x", "--max-new-tokens", "900000", "--raw", "--temperature", "0"]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        assert process.stdout.read(1)
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert out.endswith(b"\n") and err.decode().strip() == "whet: interrupted"


@pytest.mark.parametrize("model", ["tiny_model", "tiny_gguf"])
def test_examples_run_on_a_folder_and_a_file(model, request, tmp_path, monkeypatch, capsys):
    model = str(request.getfixturevalue(model))
    monkeypatch.setattr(sys, "argv", ["generate.py", model, "x"])
    runpy.run_path("examples/generate.py", run_name="__main__")
    assert float(capsys.readouterr().out.split()[0]) < 0
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    monkeypatch.setattr(sys, "argv", ["perplexity.py", model, str(tmp_path / "rows.jsonl")])
    runpy.run_path("examples/perplexity.py", run_name="__main__")
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[0] for line in lines] == ["float32", "bf16", "int8", "q8_0", "int4", "q4_k"]
    assert all(1 < float(line[1]) < 10_000 for line in lines)
    monkeypatch.setattr(sys, "argv", ["grpo_without_torch.py", model, str(tmp_path / "adapter"), "--steps", "2"])
    runpy.run_path("examples/grpo_without_torch.py", run_name="__main__")
    assert capsys.readouterr().out.count("gradient norm") == 2
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()


def test_a_schema_is_followed(run, tiny_model, tmp_path, error_of):
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    (tmp_path / "schema.json").write_text(json.dumps(schema))
    argv = ["generate", tiny_model, "--prompt", "x", "--max-new-tokens", "60"]
    for several in ([], ["-n", "3"]):
        out = run(*argv, "--schema", tmp_path / "schema.json", *several).out
        texts = [text for text in re.split("--- .*\n", out) if text]
        assert len(texts) == (3 if several else 1) and all(json.loads(text)["a"] in (1, 2) for text in texts)
    assert run(*argv, "--regex", "(ab|ba){3}").out.strip() in {a + b + c for a in AB for b in AB for c in AB}
    (tmp_path / "list.json").write_text("[1]")
    error = error_of(*map(str, argv), "--schema", str(tmp_path / "list.json"))
    assert_mentions(error, "schema", "[1]", "is a list", "JSON object")
    error = error_of(*map(str, argv), "--schema", str(tmp_path / "absent.json"))
    assert_mentions(error, "schema", "absent.json", "neither a file")
    error = error_of(*map(str, argv), "--schema", str(tmp_path / "schema.json"), "--regex", "a")
    assert_mentions(error, "schema and regex are set", "one")


AB = ("ab", "ba")
