"""Frequencies of rotary embeddings with the scaling of long-context models. Float64, NumPy only.

Reads Hugging Face's ``rope_scaling`` (later ``rope_parameters``) of a config.json and returns the frequencies of its
``ROPE_INIT_FUNCTIONS``, which compute in float32. With d = rotary_dim, theta_i = base^(-2i / d), s = factor and L the
original length:

    linear        theta_i / s                                              (Chen et al., 2023)
    dynamic       with base (s n / L - (s - 1))^(d / (d - 2)) as the base, for a sequence of n > L tokens (NTK-aware)
    yarn          theta_i if a pair rotates more than beta_fast times in L, theta_i / s below beta_slow rotations, a
                  ramp over i between; cosines and sines times 0.1 ln s + 1     (Peng et al., 2023, section 3)
    llama3        theta_i if the wavelength is below L / high_freq_factor, theta_i / s above L / low_freq_factor, a
                  blend between                                            (Llama 3.1)
    longrope      theta_i / short_factor[i], or long_factor[i] for sequences longer than L; cosines and sines times
                  sqrt(1 + ln s / ln L)                                    (Ding et al., 2024)
    proportional  base^(-2i / head_size) / s for the first partial_rotary_factor of the pairs, 0 for the others

dynamic and longrope depend on the length of the sequence. Here it is max_position, the length of the table, as in vLLM
for dynamic with max_position = s L; Hugging Face recomputes the frequencies for each length.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from whet.errors import WhetTypeError, WhetValueError
from whet.ops import inputs

_DEFAULT_BASE = 10000.0


def rope_frequencies(
    head_size: int,
    rotary_dim: int | None,
    max_position: int,
    base: float = _DEFAULT_BASE,
    scaling: Mapping[str, Any] | None = None,
) -> tuple[np.ndarray, float]:
    """Return inv_freq (rotary_dim / 2,) float64 in radians per position, and the factor of cosines and sines.

    Args:
        rotary_dim: even; None: head_size times the scaling's partial_rotary_factor (1 if missing).
        max_position: tokens of the longest sequence.
        base: rope_theta; must agree with a rope_theta in ``scaling``, unless it is the default.
        scaling: a dict with "rope_type" (or "type") and the settings of that type, as above; None: no scaling.

    Raises:
        WhetValueError: a setting is missing, unknown, or invalid.
        WhetTypeError: scaling is not a dict, or a setting is not a number.
    """
    settings = _Settings(dict(scaling) if isinstance(scaling, Mapping) else _reject_non_dict(scaling), max_position)
    kind = settings.kind()
    base = settings.base(base)
    share = settings.number("partial_rotary_factor", default=1.0, highest=1.0)
    if rotary_dim is None:
        rotary_dim = head_size if kind == "proportional" else int(head_size * share)
    dim = inputs.as_positive_int("get_rope", "rotary_dim", rotary_dim)
    if dim % 2 or dim > head_size or (kind == "proportional" and dim != head_size):
        expected = f"head_size={head_size}" if kind == "proportional" else f"an even number up to head_size={head_size}"
        raise WhetValueError(f"get_rope: rotary_dim is {dim}, expected {expected}.")
    rotary = _Rotary(dim, base, base ** (-np.arange(0, dim, 2) / dim), share)
    frequencies = _KINDS[kind](rotary, settings)
    settings.check_all_used(kind)
    return frequencies


def _reject_non_dict(scaling: Any) -> dict[str, Any]:
    if scaling is not None:
        raise WhetTypeError(
            f"get_rope: scaling is a {type(scaling).__name__}, expected a dict such as "
            '{"rope_type": "linear", "factor": 2.0}, or None.'
        )
    return {}


@dataclass(frozen=True)
class _Rotary:
    """rotary_dim, base, unscaled inv_freq, and the share of the pairs that rotate (proportional)."""

    dim: int
    base: float
    inv_freq: np.ndarray
    share: float


class _Settings:
    """The settings of ``scaling``; raises for missing, invalid and unknown settings."""

    def __init__(self, given: dict[str, Any], max_position: int) -> None:
        self.given, self.max_position, self.used = given, max_position, {"rope_type", "type"}

    def kind(self) -> str:
        kind = self.given.get("rope_type", self.given.get("type", "default" if not self.given else None))
        if not isinstance(kind, str) or kind not in _KINDS:
            raise WhetValueError(
                f"get_rope: scaling has rope_type {kind!r}, expected one of {', '.join(map(repr, _KINDS))}."
            )
        return kind

    def base(self, base: float) -> float:
        if not 1.0 < base < math.inf:
            raise WhetValueError(f"get_rope: base is {base}, expected a number above 1.")
        theta = self.number("rope_theta", default=float(base), above=1.0)
        if theta != base != _DEFAULT_BASE:
            raise WhetValueError(f"get_rope: base is {base}, but scaling has rope_theta {theta}. Give one of them.")
        return theta

    def value(self, name: str) -> Any:
        self.used.add(name)
        return self.given.get(name)

    def number(
        self, name: str, *, default: float | None = None, above: float = 0.0, highest: float = math.inf
    ) -> float:
        value = self.value(name)
        value = default if value is None else value
        if value is None:
            raise WhetValueError(
                f"get_rope: scaling has no {name!r}, which {self.kind()} requires. {_FIXES.get(name, '')}"
            )
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise WhetTypeError(f"get_rope: scaling[{name!r}] is {value!r}, expected a number.")
        if not above < value <= highest or not math.isfinite(value):
            limit = "" if highest == math.inf else f" and at most {highest:g}"
            raise WhetValueError(f"get_rope: scaling[{name!r}] is {value}, expected a number above {above:g}{limit}.")
        return float(value)

    def original_length(self) -> float:
        return self.number("original_max_position_embeddings", above=1.0)

    def factor(self) -> float:
        """Return the factor; default: the length of the table over the original length."""
        return self.number("factor", default=self.max_position / self.original_length())

    def numbers(self, name: str, n: int) -> np.ndarray:
        value = np.asarray(self.value(name) if self.value(name) is not None else [], np.float64)
        if value.shape != (n,) or not (value > 0).all():
            raise WhetValueError(
                f"get_rope: scaling[{name!r}] has shape {value.shape}, expected {n} numbers above 0, one for each pair."
            )
        return value

    def check_all_used(self, kind: str) -> None:
        unknown = sorted(self.given.keys() - self.used)
        if unknown:
            known = ", ".join(sorted(self.used - {"type"}))
            raise WhetValueError(f"get_rope: scaling has {unknown[0]!r}, unknown for {kind}. Its settings are {known}.")


_FIXES = {
    "original_max_position_embeddings": "Pass the length the model was trained for (its max_position_embeddings).",
    "factor": "Pass how many times as long as the original the context is.",
}


def _default(rotary: _Rotary, _: _Settings) -> tuple[np.ndarray, float]:
    return rotary.inv_freq, 1.0


def _linear(rotary: _Rotary, settings: _Settings) -> tuple[np.ndarray, float]:
    return rotary.inv_freq / settings.number("factor"), 1.0


def _dynamic(rotary: _Rotary, settings: _Settings) -> tuple[np.ndarray, float]:
    factor, original, dim = settings.number("factor"), settings.original_length(), rotary.dim
    if dim == 2:
        raise WhetValueError("get_rope: rotary_dim is 2, and dynamic scaling needs at least 4.")
    length = max(settings.max_position, original)
    base = rotary.base * (factor * length / original - (factor - 1)) ** (dim / (dim - 2))
    return base ** (-np.arange(0, dim, 2) / dim), 1.0


def _yarn(rotary: _Rotary, settings: _Settings) -> tuple[np.ndarray, float]:
    factor, original, dim = settings.factor(), settings.original_length(), rotary.dim

    def pair_of(turns: float) -> float:
        """Return the fractional index of the pair that rotates ``turns`` times over the original length."""
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rotary.base))

    low = pair_of(settings.number("beta_fast", default=32.0))
    high = pair_of(settings.number("beta_slow", default=1.0))
    truncate = settings.value("truncate")
    if truncate is None or truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = np.clip((np.arange(dim // 2) - low) / ((high - low) or 0.001), 0, 1)

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    weights = [settings.number(name, default=0.0, above=-math.inf) for name in ("mscale", "mscale_all_dim")]
    inferred = mscale(weights[0]) / mscale(weights[1]) if all(weights) else mscale(1.0)
    return rotary.inv_freq * (ramp / factor + 1 - ramp), settings.number("attention_factor", default=inferred)


def _llama3(rotary: _Rotary, settings: _Settings) -> tuple[np.ndarray, float]:
    factor, original = settings.number("factor"), settings.original_length()
    low, high = settings.number("low_freq_factor"), settings.number("high_freq_factor")
    if high <= low:
        raise WhetValueError(f"get_rope: scaling has high_freq_factor {high}, expected above low_freq_factor {low}.")
    turns = original * rotary.inv_freq / (2 * math.pi)
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    return rotary.inv_freq * ((1 - smooth) / factor + smooth), 1.0


def _longrope(rotary: _Rotary, settings: _Settings) -> tuple[np.ndarray, float]:
    factor, original, n = settings.factor(), settings.original_length(), rotary.dim // 2
    short, long = settings.numbers("short_factor", n), settings.numbers("long_factor", n)
    inferred = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    stretch = long if settings.max_position > original else short
    return rotary.inv_freq / stretch, settings.number("attention_factor", default=inferred)


def _proportional(rotary: _Rotary, settings: _Settings) -> tuple[np.ndarray, float]:
    rotates = np.arange(rotary.dim // 2) < int(rotary.share * rotary.dim // 2)
    return np.where(rotates, rotary.inv_freq / settings.number("factor", default=1.0), 0.0), 1.0


_KINDS: dict[str, Callable[[_Rotary, _Settings], tuple[np.ndarray, float]]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "llama3": _llama3,
    "longrope": _longrope,
    "proportional": _proportional,
}
