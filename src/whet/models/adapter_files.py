"""Files of low-rank adapters: Whet's format, which keeps the state of training, and PEFT's.

``save_adapters`` writes one safetensors file for all adapters of a model, by module name: ``MODULE.lora_A`` (r, in),
``MODULE.lora_B`` (r, out), gradients, moments and EWC memory; scalars as JSON in the file's metadata.

``from_peft`` and ``to_peft`` exchange A and B with PEFT (https://huggingface.co/docs/peft), which writes a folder with
``adapter_config.json`` and ``adapter_model.safetensors``: ``base_model.model.MODULE.lora_A.weight`` (r, in) and
``...lora_B.weight`` (out, r). Only plain LoRA is supported; any other feature is rejected, never dropped.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from whet.errors import CheckpointError, WhetTypeError, WhetValueError, check_installed
from whet.files import replace_bytes
from whet.ops.micro_lora import MicroLoRA

_FORMAT = "whet-micro-lora-1"
PEFT_PREFIX = "base_model.model."
"""Prefix of module names in PEFT's files."""
SCORE = "score"
"""The head of a reward model in transformers, which PEFT saves with adapters of the task SEQ_CLS."""
REWARD_USE = "It scores answers and writes none: pass it as --reward, or to RewardModel, or serve it for /score."
MAGNITUDE = "lora_magnitude_vector"
"""PEFT's name of the magnitudes of DoRA, a parameter of the adapted module."""
Factors = tuple[np.ndarray, np.ndarray, float]
"""A (r, in), B (out, r), and their scaling or alpha. Of E experts: A (E r, in), expert after expert, and B (out, r E),
in which the columns of an expert are E apart."""


class Dora(NamedTuple):
    """Factors of DoRA, and the lengths of the rows of the result, (out,)."""

    factors: Factors
    magnitude: np.ndarray


class TokenRows(NamedTuple):
    """Trained rows of an embedding: the tokens, and (tokens, hidden_dim)."""

    ids: list[int]
    values: np.ndarray


EXPERT_PARAMETERS = ("gate_up_proj", "up_proj", "down_proj")
"""Parameters of the experts of a mixture in transformers, in their order: with gates the first and the last, without
them the others. PEFT's ``target_parameters`` gives each a wrapper of the experts, the last outside."""


def save_adapters(path: str | os.PathLike[str], adapters: Mapping[str, MicroLoRA]) -> None:
    """Write adapters, by module name, with their complete state to one safetensors file, atomically.

    Raises:
        WhetValueError: there are no adapters, or the folder is missing.
        WhetTypeError: a key is not a str, or a value not a MicroLoRA.
        MissingExtraError: safetensors is not installed.
    """
    _check_adapters("save_adapters", adapters)
    tensors, numbers = {}, {}
    for module, adapter in adapters.items():
        state = adapter.state_dict()
        tensors |= {f"{module}.{name}": value for name, value in state.items() if isinstance(value, np.ndarray)}
        numbers[module] = {name: value for name, value in state.items() if not isinstance(value, np.ndarray)}
    _write_tensors("save_adapters", Path(path), tensors, {"format": _FORMAT, "adapters": json.dumps(numbers)})


def load_adapters(path: str | os.PathLike[str]) -> dict[str, MicroLoRA]:
    """Load the adapters from ``save_adapters``, by module name, to continue training.

    Raises:
        CheckpointError: the file is missing, damaged or of another format.
        MissingExtraError: safetensors is not installed.
    """
    tensors, metadata = _read_tensors("load_adapters", Path(path))
    if metadata.get("format") != _FORMAT:
        raise CheckpointError(
            f"load_adapters: {path} has format {metadata.get('format')!r}, expected {_FORMAT!r}. "
            "Read an adapter of PEFT with from_peft."
        )
    try:
        numbers = {str(module): dict(values) for module, values in json.loads(metadata["adapters"]).items()}
    except (KeyError, ValueError, TypeError, AttributeError):
        raise CheckpointError(f"load_adapters: {path} has no readable list of adapters. Save it again.") from None
    states: dict[str, dict[str, Any]] = {module: dict(values) for module, values in numbers.items()}
    for name, value in tensors.items():
        module, _, key = name.rpartition(".")
        if module not in states:
            raise CheckpointError(f"load_adapters: {path} holds {name}, whose module is not in its list of adapters.")
        states[module][key] = value
    adapters = {}
    for module, state in states.items():
        try:
            adapter = MicroLoRA.from_arrays(state["lora_A"], state["lora_B"], 1.0)
            adapter.load_state_dict(state)
        except KeyError as error:
            raise CheckpointError(
                f"load_adapters: {path}, {module}: {error.args[0]} is missing. Save it again."
            ) from None
        except (WhetValueError, WhetTypeError) as error:
            raise CheckpointError(f"load_adapters: {path}, {module}: {error}") from None
        adapters[module] = adapter
    return adapters


def from_peft(source: Any, adapter_name: str | None = None) -> dict[str, MicroLoRA]:
    """Read the LoRA adapters of a PEFT folder or a PeftModel, by module name ("model.layers.0.self_attn.q_proj").

    Args:
        source: the folder with adapter_config.json and adapter_model.safetensors, or a PeftModel.
        adapter_name: the adapter of a PeftModel. Default: the active one.

    Returns:
        A new float32 adapter per module. rslora's alpha / sqrt(r), rank_pattern and alpha_pattern are folded into
        alpha.

    Raises:
        CheckpointError: a file is missing or damaged, or an adapter is not plain LoRA of rank 1 to 8.
        MissingExtraError: safetensors (or peft, for a PeftModel) is not installed.
    """
    adapters = {}
    for module, (a, b, scaling) in read_peft(source, adapter_name).items():
        if len(a) > 8:
            raise CheckpointError(f"from_peft: {module} has rank {len(a)}, expected 1 to 8.")
        adapters[module] = MicroLoRA.from_arrays(a, np.ascontiguousarray(b.T), scaling * len(a))
    return adapters


def read_peft(source: Any, adapter_name: str | None = None) -> dict[str, Factors]:
    """Read adapters of any rank, see ``from_peft``: module name -> A (r, in), B (out, r), scaling of B A."""
    if isinstance(source, (str, os.PathLike)):
        where = f"from_peft({str(source)!r})"
        config, tensors = _read_folder(source, where)
    else:
        where = "from_peft"
        config, tensors = _read_peft_model(source, adapter_name)
    _check_plain(where, config)
    return _pair_factors(config, tensors, where)


def read_peft_modules(
    folder: str | os.PathLike[str], merged: bool = False, *, head: bool = False
) -> dict[str, Factors | Dora | TokenRows | dict[str, np.ndarray]]:
    """Read a PEFT folder: module name -> A, B, scaling as ``read_peft``, with magnitudes if they are DoRA; or the
    weight and bias of a trained norm.

    Args:
        folder: the folder.
        merged: whether weights may change: then also trained tokens, and the weight and bias of other modules.
        head: whether the adapters are a reward model's, whose head is the entry "score".

    Raises:
        CheckpointError: as ``read_peft``, or a trained module that is not a norm, or a reward model without ``head``.
    """
    where = f"from_peft({str(folder)!r})"
    config, tensors = _read_folder(folder, where)
    _check_plain(where, config, except_for=MERGED if merged else SEPARATE)
    score = tensors.pop(f"{PEFT_PREFIX}{SCORE}.weight", None)
    if (score is not None) != head:
        if head:
            raise CheckpointError(f"{where}: the head {SCORE} of a reward model is missing. Save the adapters again.")
        raise CheckpointError(f"{where}: the adapters are a reward model. {REWARD_USE}")
    whole: dict[str, dict[str, np.ndarray]] = {}
    found: dict[str, Any] = {}
    magnitudes: dict[str, np.ndarray] = {}
    for name in list(tensors) if merged else [name for name, value in tensors.items() if value.ndim == 1]:
        module, _, part = name.removeprefix(PEFT_PREFIX).removesuffix(".weight").rpartition(".")
        if part == MAGNITUDE:
            magnitudes[module] = tensors.pop(name)
        elif part == "trainable_tokens_delta":
            module = module.removesuffix(".token_adapter")
            found[module] = TokenRows(_token_ids(config, module, where), tensors.pop(name))
        elif ".lora_" in name:
            continue
        elif ".base_layer." in name:  # PEFT saves a head or an embedding with adapters, unchanged
            del tensors[name]
        else:
            module, _, part = name.removeprefix(PEFT_PREFIX).rpartition(".")
            whole.setdefault(module, {})[part] = tensors.pop(name)
    for module, factors in _pair_factors(config, tensors, where).items():
        found[module] = Dora(factors, magnitudes.pop(module)) if module in magnitudes else factors
    if bool(config.get("use_dora")) != any(isinstance(each, Dora) for each in found.values()) or magnitudes:
        raise CheckpointError(
            f"{where}: use_dora is {config.get('use_dora')}, and the magnitudes do not fit the factors. Save it again."
        )
    return {**found, **whole, **({} if score is None else {SCORE: {"weight": score}})}


def _token_ids(config: Mapping[str, Any], module: str, where: str) -> list[int]:
    """Return the trained tokens of an embedding, in PEFT's order."""
    given = config.get("trainable_token_indices")
    given = given if isinstance(given, Mapping) else {module: given}
    ids = next((ids for name, ids in given.items() if f".{module}".endswith(f".{name}")), None)
    if not isinstance(ids, list) or not all(isinstance(each, int) and each >= 0 for each in ids):
        raise CheckpointError(f"{where}: trainable_token_indices is {given!r:.60}, expected token ids of {module}.")
    return ids


def has_reward_head(folder: str | os.PathLike[str]) -> bool:
    """Whether a folder has adapters that are a reward model: PEFT's task is SEQ_CLS."""
    try:
        return read_peft_config("adapters", Path(folder) / "adapter_config.json").get("task_type") == "SEQ_CLS"
    except CheckpointError:  # which reading the adapters reports
        return False


def check_reward_head(
    module: Mapping[str, np.ndarray], hidden_dim: int, where: str, folder: str | os.PathLike[str]
) -> np.ndarray:
    """Return the weight (1, hidden_dim) of a head.

    Raises:
        CheckpointError: another shape, or NaN or infinity.
    """
    weight = module["weight"]
    if weight.shape != (1, hidden_dim) or not np.isfinite(weight).all():
        raise CheckpointError(
            f"{where}: {os.fspath(folder)}: {SCORE}.weight is {weight.shape}, expected (1, {hidden_dim}) finite "
            f"numbers: one label on this model."
        )
    return weight


def wrapper_of(name: str, names: Iterable[str]) -> str:
    """Return PEFT's module with the adapter of a module, or of a parameter of experts; ``names``: all with one."""
    holder, _, parameter = name.rpartition(".")
    if not is_expert_parameter(name):
        return name
    is_inside = parameter != EXPERT_PARAMETERS[-1] and f"{holder}.{EXPERT_PARAMETERS[-1]}" in names
    return f"{holder}.base_layer" if is_inside else holder


def is_expert_parameter(name: str) -> bool:
    """Whether a name is of the matrices of all experts of a layer."""
    *_, holder, end = ("", *name.split("."))
    return holder == "experts" and end in EXPERT_PARAMETERS


def adapted_name(wrapper: str, config: Mapping[str, Any]) -> str:
    """Return the inverse of ``wrapper_of`` for the adapters of a config."""
    holder = wrapper.removesuffix(".base_layer")
    given = [f".{name}" for name in config.get("target_parameters") or ()]
    wrapped = [name for end in EXPERT_PARAMETERS if f".{(name := f'{holder}.{end}')}".endswith(tuple(given))]
    if not wrapped or not is_expert_parameter(wrapped[0]):
        return wrapper
    return wrapped[0 if holder != wrapper else -1]


def _read_folder(folder: str | os.PathLike[str], where: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    config = read_peft_config(where, Path(folder) / "adapter_config.json")
    return config, _read_tensors(where, Path(folder) / "adapter_model.safetensors")[0]


def _pair_factors(config: Mapping[str, Any], tensors: Mapping[str, np.ndarray], where: str) -> dict[str, Factors]:
    pairs: dict[str, dict[str, np.ndarray]] = {}
    for name, value in tensors.items():
        match = re.fullmatch(rf"{re.escape(PEFT_PREFIX)}(.+)\.lora_([AB])\.weight", name)
        if match is None or value.ndim != 2:
            raise CheckpointError(
                f"{where}: {name} {value.shape} is not a factor of a linear layer. Merge it: whet merge."
            )
        pairs.setdefault(adapted_name(match[1], config), {})[match[2]] = value
    if not pairs:
        raise CheckpointError(f"{where}: it has no lora_A and lora_B.")
    adapters = {}
    for module, pair in pairs.items():
        if len(pair) != 2 or pair["A"].shape[0] != pair["B"].shape[1] or not len(pair["A"]):
            shapes = ", ".join(f"lora_{letter} {value.shape}" for letter, value in pair.items())
            raise CheckpointError(f"{where}: {module} has {shapes}, expected (r, in) and (out, r).")
        is_of_experts = is_expert_parameter(module)
        rank = _setting(where, config, module, "rank_pattern", "r") if is_of_experts else len(pair["A"])
        alpha = _setting(where, config, module, "alpha_pattern", "lora_alpha")
        scaling = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
        adapters[module] = (pair["A"], pair["B"], scaling)
    return adapters


def to_peft(path: str | os.PathLike[str], adapters: Mapping[str, MicroLoRA], base_model_name: str) -> None:
    """Write adapters, by module name, to a folder for ``PeftModel.from_pretrained``.

    Only A and B are written, not gradients, moments and EWC memory.

    Raises:
        WhetValueError: there are no adapters.
        WhetTypeError: a key is not a str, or a value not a MicroLoRA.
        MissingExtraError: safetensors is not installed.
    """
    _check_adapters("to_peft", adapters)
    factors = {name: (a.A, a.B.T, a.alpha) for name, a in adapters.items()}
    write_peft(path, factors, peft_config(factors, base_model_name, None))


def peft_config(
    adapters: Mapping[str, Factors],
    base_model_name: str,
    task_type: str | None,
    target_modules: Sequence[str] = (),
    modules_to_save: Sequence[str] = (),
    lora_dropout: float = 0.0,
    n_experts: int = 1,
    use_dora: bool = False,
) -> dict[str, Any]:
    """Return the contents of adapter_config.json.

    Args:
        adapters: A, B and alpha of each module.
        target_modules: ends of names. Default: the names of modules.
        modules_to_save: ends of the names of modules that are trained whole.
        n_experts: experts of a layer, of which some adapters are.
        use_dora: whether the adapters have magnitudes.
    """
    parameters = list(filter(is_expert_parameter, adapters))
    ranks = {name: len(a) // (n_experts if name in parameters else 1) for name, (a, _, _) in adapters.items()}
    settings = {name: (ranks[name], _plain_number(alpha)) for name, (_, _, alpha) in adapters.items()}
    rank, alpha = next(iter(settings.values()))
    # PEFT reads the names of its patterns as regular expressions.
    different = {re.escape(name): own for name, own in settings.items() if own != (rank, alpha)}
    return {
        "peft_type": "LORA",
        "task_type": task_type,
        "base_model_name_or_path": base_model_name,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": lora_dropout,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": use_dora,
        "target_modules": sorted(target_modules or (name for name in adapters if name not in parameters)),
        "target_parameters": sorted(parameters) or None,
        "modules_to_save": list(modules_to_save) or None,
        "rank_pattern": {name: own[0] for name, own in different.items()},
        "alpha_pattern": {name: own[1] for name, own in different.items()},
    }


def write_peft(
    path: str | os.PathLike[str],
    adapters: Mapping[str, Factors],
    config: Mapping[str, Any],
    others: Mapping[str, np.ndarray] | None = None,
) -> None:
    """Write adapters of any rank, magnitudes and trained norms by the names of their parameters, and a
    ``peft_config``.
    """
    tensors = {f"{PEFT_PREFIX}{name}": value for name, value in (others or {}).items()}
    for name, (a, b, _) in adapters.items():
        module = wrapper_of(name, adapters)
        tensors[f"{PEFT_PREFIX}{module}.lora_A.weight"] = np.ascontiguousarray(a)
        tensors[f"{PEFT_PREFIX}{module}.lora_B.weight"] = np.ascontiguousarray(b)
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    _write_tensors("to_peft", folder / "adapter_model.safetensors", tensors, {"format": "pt"})
    replace_bytes(folder / "adapter_config.json", (json.dumps(config, indent=2) + "\n").encode())


# --- PEFT's configuration ---------------------------------------------------------------------------------

# Settings that change the formula or the base model's weights, with their values for plain LoRA.
_MERGE = "Merge it: whet merge MODEL OUT --adapter FOLDER."
_PLAIN = {
    "use_dora": False,
    "lora_bias": False,
    "use_qalora": False,
    "layer_replication": None,
    "alora_invocation_tokens": None,
    "modules_to_save": None,
    "trainable_token_indices": None,
    "megatron_config": None,
    "target_parameters": None,
    "use_bdlora": None,
    "arrow_config": None,
}
SEPARATE = ("use_dora", "modules_to_save")
"""Settings beyond plain LoRA that an engine can compute next to the weights, modules_to_save if they are norms."""
MERGED = (*SEPARATE, "trainable_token_indices")
"""Settings beyond plain LoRA whose result can be merged into the weights."""
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


def describe_special(config: Mapping[str, Any], where: str, except_for: Sequence[str] = ()) -> str:
    """Return the first setting beyond plain LoRA, except some; empty: none.

    Raises:
        CheckpointError: the adapters are not LoRA.
    """
    _check_lora(where, config)
    return next((f"{key}={config[key]!r}" for key, _ in _specials(config) if key not in except_for), "")


def _check_plain(where: str, config: Mapping[str, Any], except_for: Sequence[str] = ()) -> None:
    _check_lora(where, config)
    for key, message in _specials(config):
        if key not in except_for:
            raise CheckpointError(f"{where}: {message}")


def _check_lora(where: str, config: Mapping[str, Any]) -> None:
    if config.get("peft_type") != "LORA":
        raise CheckpointError(f"{where}: peft_type is {config.get('peft_type')!r}, expected 'LORA'.")


def _specials(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the settings beyond plain LoRA, with error messages."""
    for key, plain in _PLAIN.items():
        is_of_experts = key == "target_parameters" and all(map(_may_be_of_experts, config.get(key) or ()))
        if config.get(key) not in (plain, None, False, []) and not is_of_experts:
            yield (
                key,
                f"{key} is {config[key]!r}; only plain LoRA is read. {_MERGE}",
            )
    if config.get("bias", "none") != "none":
        yield "bias", f"bias is {config['bias']!r}, expected 'none': trained biases are not LoRA."
    init = config.get("init_lora_weights")
    if isinstance(init, str) and init.lower().startswith(_CHANGES_BASE):
        yield (
            "init_lora_weights",
            f"init_lora_weights is {init!r}, which changes the base model too. Convert it with PEFT's "
            "save_pretrained(path_initial_model_for_weight_conversion=...).",
        )


def _may_be_of_experts(name: Any) -> bool:
    """Whether an end of a parameter's name may be one of experts."""
    return isinstance(name, str) and is_expert_parameter(name if "." in name else f"experts.{name}")


def match_pattern(pattern: Mapping[str, Any], module: str, default: Any) -> Any:
    """Return the value of the first regular expression that matches the module or its end (PEFT's rule)."""
    return next((own for name, own in pattern.items() if re.match(rf"(.*\.)?({name})$", module)), default)


def _setting(where: str, config: Mapping[str, Any], module: str, patterns: str, default: str) -> float:
    """Return the value of the first pattern that matches the module or its end (PEFT's rule), or the default's."""
    pattern, value = config.get(patterns) or {}, config.get(default, 8)
    try:
        value = match_pattern(pattern, module, value)
    except (AttributeError, re.error) as error:
        raise CheckpointError(
            f"{where}: {patterns} is {pattern!r:.60}, expected regular expressions with a number each: {error}."
        ) from None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise CheckpointError(
            f"{where}: the {default.removeprefix('lora_')} of {module} is {value!r:.60}, expected a finite number."
        )
    return float(value)


def _read_peft_model(model: Any, adapter_name: str | None) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    if not hasattr(model, "peft_config"):
        raise WhetTypeError(f"from_peft: source is a {type(model).__name__}, expected a folder or a PeftModel.")
    check_installed("from_peft of a PeftModel", "peft", extra="peft")
    from peft import get_peft_model_state_dict  # pyright: ignore[reportMissingImports]

    name = adapter_name or model.active_adapter
    if name not in model.peft_config:
        raise WhetValueError(f"from_peft: there is no adapter {name!r}, only {', '.join(model.peft_config)}.")
    state = get_peft_model_state_dict(model, adapter_name=name)
    return model.peft_config[name].to_dict(), {key: value.float().cpu().numpy() for key, value in state.items()}


def read_peft_config(where: str, path: Path) -> dict[str, Any]:
    """Read adapter_config.json.

    Raises:
        CheckpointError: it cannot be read, or is not an object.
    """
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{where}: {path} cannot be read: {error.strerror}.") from None
    except ValueError as error:
        raise CheckpointError(f"{where}: {path} is not JSON: {error}.") from None
    if not isinstance(config, dict):
        raise CheckpointError(f"{where}: {path} holds a {type(config).__name__}, expected an object.")
    return config


def is_adapter_folder(path: str | os.PathLike[str]) -> bool:
    """Whether PEFT, or ``whet train``, has saved adapters in the folder."""
    return (Path(path) / "adapter_config.json").is_file()


def base_name(folder: str | os.PathLike[str], where: str) -> str:
    """Return the path or name of the base model of a PEFT folder.

    Raises:
        CheckpointError: adapter_config.json cannot be read, or has no base_model_name_or_path.
    """
    path = Path(folder) / "adapter_config.json"
    name = read_peft_config(where, path).get("base_model_name_or_path")
    if not isinstance(name, str) or not name:
        raise CheckpointError(f"{where}: {path} has base_model_name_or_path {name!r:.60}, expected the model's path.")
    return name


def _plain_number(x: float) -> float | int:
    return int(x) if x.is_integer() else x


# --- files ------------------------------------------------------------------------------------------------


def _check_adapters(function: str, adapters: Mapping[str, MicroLoRA]) -> None:
    if not adapters:
        raise WhetValueError(f"{function}: adapters is empty. Pass {{module name: MicroLoRA}}.")
    for module, adapter in adapters.items():
        if not isinstance(module, str) or not module or not isinstance(adapter, MicroLoRA):
            raise WhetTypeError(
                f"{function}: adapters has {module!r}: {type(adapter).__name__}, expected a module name: MicroLoRA."
            )


def _safetensors(function: str) -> Any:
    check_installed(function, "safetensors")
    import safetensors.numpy

    return safetensors


def _write_tensors(function: str, path: Path, tensors: dict[str, np.ndarray], metadata: dict[str, str]) -> None:
    data = _safetensors(function).numpy.save(tensors, metadata)
    if not path.parent.is_dir():
        raise WhetValueError(f"{function}: there is no folder {path.parent}. Create it first.")
    replace_bytes(path, data)


def _read_tensors(where: str, path: Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Read the tensors of a file, as float32, and its metadata."""
    library = _safetensors(where)
    try:
        data = path.read_bytes()
        parsed = library.deserialize(data)
    except OSError as error:
        raise CheckpointError(f"{where}: {path} cannot be read: {error.strerror}.") from None
    except library.SafetensorError as error:
        raise CheckpointError(f"{where}: {path} is damaged or not a safetensors file: {error}.") from None
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    tensors = {}
    for name, view in parsed:
        if view["dtype"] == "BF16":
            values = (np.frombuffer(view["data"], "<u2").astype(np.uint32) << 16).view(np.float32)
        elif view["dtype"] in ("F16", "F32"):
            values = np.frombuffer(view["data"], "<f2" if view["dtype"] == "F16" else "<f4")
        else:
            raise CheckpointError(f"{where}: {path}: {name} is {view['dtype']}, expected F32, F16 or BF16.")
        tensors[name] = values.astype(np.float32).reshape(view["shape"])
    return tensors, header.get("__metadata__", {})
