"""RoPE for inputs longer than those of training: other frequencies, and a factor for queries and keys.

The names and keys are those of Hugging Face's ``rope_scaling`` (``transformers/modeling_rope_utils.py``), with ``ntk``
added. For d_r rotating dimensions, pair i has the frequency theta_i = base^(-2i/d_r). Let s be ``factor``, and L
be ``original_max_position_embeddings``: the number of tokens of the longest training sentence, with its end. It is
counted on the side that has the scaling; for ``dynamic`` and ``longrope``, always on the source.

============  ====================================================================================================
rope_type     frequency of pair i
============  ====================================================================================================
default       theta_i
linear        theta_i / s: position interpolation (Chen et al. 2023, arXiv:2306.15595)
ntk           theta_i with the base * s^(d_r / (d_r - 2)) (bloc97 2023, "NTK-aware scaled RoPE")
dynamic       as ntk, with s * l / L - (s - 1) in place of s; l is the length of the input, at least L
yarn          between theta_i (pairs that rotate more than beta_fast times within L) and theta_i / s (less than
              beta_slow times) (Peng et al. 2023, arXiv:2309.00071)
llama3        between theta_i (wavelength below L / high_freq_factor) and theta_i / s (above L / low_freq_factor)
              (Grattafiori et al. 2024, arXiv:2407.21783)
longrope      theta_i / short_factor_i, or theta_i / long_factor_i if the input is longer than L (Ding et al. 2024,
              arXiv:2402.13753)
proportional  theta_i / s for the first partial_rotary_factor of the pairs, and 0 for the others (Barbero et al. 2024,
              "Round and round we go!", arXiv:2410.06205)
============  ====================================================================================================

In ``yarn`` and ``longrope``, rotated queries and keys are also multiplied by an attention factor.

In ``dynamic`` and ``longrope``, the frequencies depend on the length of the input. That is the number of positions of
the longest source in the batch, padding included, for the encoder and for the decoder. So it is known before a search
starts, all cached keys have the same frequencies, and step-by-step decoding computes what scoring computes.
"""

import json
import math
from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor

from .sharing import current_pass

REQUIRED = object()
LARGEST = 1e9  # of any number, so that none overflows
LENGTH = "original_max_position_embeddings"
# rope_type -> the default of each of its keys
KEYS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": REQUIRED},
    "ntk": {"factor": REQUIRED},
    "dynamic": {"factor": REQUIRED, LENGTH: REQUIRED},
    "yarn": {
        **{"factor": REQUIRED, LENGTH: REQUIRED, "beta_fast": 32, "beta_slow": 1},
        **{"attention_factor": None, "mscale": None, "mscale_all_dim": None, "truncate": True},
    },
    "llama3": dict.fromkeys(("factor", LENGTH, "low_freq_factor", "high_freq_factor"), REQUIRED),
    "longrope": {
        **{"short_factor": REQUIRED, "long_factor": REQUIRED, LENGTH: REQUIRED},
        **{"factor": 1, "attention_factor": None},
    },
    "proportional": {"partial_rotary_factor": REQUIRED, "factor": 1},
}


def _plain(value: Any) -> Any:
    """Return *value* with whole numbers as integers, and tuples as lists."""
    if isinstance(value, (list, tuple)):
        return [_plain(number) for number in value]
    return int(value) if type(value) is float and value.is_integer() else value


def _refusal(key: str, value: Any) -> str:
    """Return which values *key* can have; "" if *value* is one of them."""
    is_number = type(value) in (int, float) and 0 < value <= LARGEST
    is_allowed, allowed = is_number, "a number above 0"
    if key == "truncate":
        is_allowed, allowed = type(value) is bool, "true or false"
    elif key in ("short_factor", "long_factor"):
        is_allowed = isinstance(value, list) and not any(_refusal("", number) for number in value)
        allowed = "a list of numbers above 0"
    elif key == LENGTH:
        is_allowed, allowed = type(value) is int and value > 1, "an integer above 1"
    elif key == "factor":
        is_allowed, allowed = is_number and value >= 1, "a number from 1 to 1e9"
    elif key == "partial_rotary_factor":
        is_allowed, allowed = is_number and value <= 1, "a number in (0, 1]"
    return "" if is_allowed else allowed


class RopeScaling:
    """A scaling of RoPE's frequencies.

    Args:
        value: JSON text, or a mapping, with ``rope_type`` and the keys of that type
        flag: the flag that it comes from, for messages

    Attributes:
        text: the scaling as JSON; equal scalings have the same text
        rope_type: a key of KEYS
        values: the value of each key of that type
        depends_on_length: whether the frequencies depend on the length of the input

    Raises:
        ValueError: *value* is not JSON, or a key or value is not allowed; the message names the flag and the key
    """

    def __init__(self, value: str | Mapping[str, Any], flag: str = "--rope-scaling") -> None:
        self._given = f"{flag} {value}"
        try:
            read = json.loads(value) if isinstance(value, str) else dict(value)
            self.rope_type = read.pop("rope_type")
            keys = KEYS[self.rope_type]
        except (ValueError, TypeError, AttributeError, KeyError):
            self._refuse(
                f'must be a JSON object like {{"rope_type": "linear", "factor": 4}}, of type {", ".join(KEYS)}'
            )
        unknown = next((key for key in read if key not in keys), None)
        if unknown is not None:
            self._refuse(f"{self.rope_type} has no key {unknown}, but {', '.join(keys) or 'none'}")
        self.values = {key: _plain(read.get(key, default)) for key, default in keys.items()}
        for key, value in self.values.items():
            if value is REQUIRED:
                self._refuse(f"{self.rope_type} needs the key {key}")
            allowed = "" if value is keys[key] is None else _refusal(key, value)
            if allowed:
                self._refuse(f"{key} is {value!r}, and must be {allowed}")
        for less, more in (("low_freq_factor", "high_freq_factor"), ("beta_slow", "beta_fast")):
            if less in self.values and self.values[less] >= self.values[more]:
                self._refuse(f"{less} is {self.values[less]:g}, and must be below {more}, {self.values[more]:g}")
        self.text = json.dumps({"rope_type": self.rope_type, **self.values}, sort_keys=True)
        self.depends_on_length = self.rope_type in ("dynamic", "longrope")
        self._factors: dict[tuple[str, torch.device], Tensor] = {}  # those of longrope on each device

    def _refuse(self, problem: str) -> NoReturn:
        raise ValueError(f"{self._given}: {problem}")

    def refuse_dimensions(self, dim: int, head_dim: int) -> None:
        """Raise a ValueError if *dim* rotating dimensions of heads of *head_dim* cannot have this scaling."""
        if self.rope_type == "proportional" and dim != head_dim:
            self._refuse(f"needs --rope-fraction 1, not {dim / head_dim:g}; partial_rotary_factor limits the rotation")
        if self.rope_type == "proportional" and not self._rotating(dim):
            self._refuse("partial_rotary_factor leaves no pair that rotates")
        if self.rope_type in ("ntk", "dynamic") and dim == 2:
            self._refuse("needs at least 4 rotating dimensions in a head")
        for name in ("short_factor", "long_factor"):
            if name in self.values and len(self.values[name]) != dim // 2:
                self._refuse(
                    f"{name} has {len(self.values[name])} numbers, and must have {dim // 2}, one for each pair"
                )

    def frequencies(self, theta: Tensor, base: float, length: int = 0) -> Tensor:
        """Return the frequency of each pair: float64 (d_r / 2).

        *theta* are those without scaling, base^(-2i/d_r). *length* is that of the input, for ``depends_on_length``.
        """
        longest = self.values.get("original_max_position_embeddings", 0)
        # The frequencies that change with the length are computed where theta is, without a device synchronisation.
        if self.rope_type in ("ntk", "dynamic"):
            pair = torch.arange(len(theta), dtype=torch.float64, device=theta.device)
            return torch.pow(self.larger_base(base, 2 * len(theta), length), -pair / len(theta))
        if self.rope_type == "longrope":
            key = ("long_factor" if length > longest else "short_factor", theta.device)
            if key not in self._factors:
                self._factors[key] = torch.tensor(self.values[key[0]], dtype=torch.float64, device=theta.device)
            return theta / self._factors[key]
        unscaled, dim, factor = theta.tolist(), 2 * len(theta), self.values.get("factor", 1.0)
        if self.rope_type == "linear":
            scaled = [theta_i / factor for theta_i in unscaled]
        elif self.rope_type == "yarn":
            parts = self._interpolated_parts(dim, base, longest)
            scaled = [part * theta_i / factor + (1 - part) * theta_i for theta_i, part in zip(unscaled, parts)]
        elif self.rope_type == "llama3":
            low, high = self.values["low_freq_factor"], self.values["high_freq_factor"]
            # 1 if the wavelength is below L / high, 0 if it is above L / low
            parts = [min(max((longest * theta_i / (2 * math.pi) - low) / (high - low), 0), 1) for theta_i in unscaled]
            scaled = [part * theta_i + (1 - part) * theta_i / factor for theta_i, part in zip(unscaled, parts)]
        elif self.rope_type == "proportional":
            scaled = [theta_i / factor if i < self._rotating(dim) else 0.0 for i, theta_i in enumerate(unscaled)]
        else:
            return theta
        return torch.tensor(scaled, dtype=torch.float64, device=theta.device)

    def _interpolated_parts(self, dim: int, base: float, longest: int) -> list[float]:
        """Return for each pair what part of its frequency in ``yarn`` is interpolated, from 0 to 1."""

        def pair_that_rotates(times: float) -> float:
            """Return the pair, as a real number, that rotates this many times in the longest training sentence."""
            return dim * math.log(longest / (2 * math.pi * times)) / (2 * math.log(base))

        low, high = pair_that_rotates(self.values["beta_fast"]), pair_that_rotates(self.values["beta_slow"])
        if self.values["truncate"]:
            low, high = math.floor(low), math.ceil(high)
        if high < 0:  # all pairs rotate less often than beta_slow
            return [1.0] * (dim // 2)
        if low > dim - 1:  # all rotate more often than beta_fast
            return [0.0] * (dim // 2)
        low, high = max(low, 0), min(high, dim - 1)
        if low == high:
            high += 0.001
        return [min(max((i - low) / (high - low), 0), 1) for i in range(dim // 2)]

    def frequencies_of_pass(self, theta: Tensor, base: float, positions: int) -> Tensor:
        """Return :meth:`frequencies` for the source's length in this forward pass, or for *positions* without a source.

        Raises:
            ValueError: activation checkpointing computes a layer again during the backward pass, without the source
        """
        length = current_pass().source_length
        if length is None and torch._C._current_graph_task_id() != -1:
            self._refuse("depends on the length of the source, and does not work with activation checkpointing")
        return self.frequencies(theta, base, positions if length is None else length)

    def attention_factor(self) -> float:
        """Return the number by which rotated queries and keys are multiplied."""
        chosen, factor = self.values.get("attention_factor"), self.values.get("factor", 1.0)
        if chosen is not None:
            return float(chosen)
        if self.rope_type == "longrope":
            return math.sqrt(1 + math.log(factor) / math.log(self.values["original_max_position_embeddings"]))
        if self.rope_type == "yarn":
            mscale, mscale_all_dim = self.values["mscale"], self.values["mscale_all_dim"]
            if mscale and mscale_all_dim:
                return (0.1 * mscale * math.log(factor) + 1) / (0.1 * mscale_all_dim * math.log(factor) + 1)
            return 0.1 * math.log(factor) + 1
        return 1.0

    def larger_base(self, base: float, dim: int, length: int = 0) -> float:
        """Return the base of ``ntk``, or that of ``dynamic`` for an input of *length*, for d_r = *dim*."""
        factor = self.values["factor"]
        if self.rope_type == "dynamic":
            longest = self.values["original_max_position_embeddings"]
            factor = factor * max(length, longest) / longest - (factor - 1)
        return float(base * factor ** (dim / (dim - 2)))

    def _rotating(self, dim: int) -> int:
        return int(self.values["partial_rotary_factor"] * dim // 2)


def read_scaling(value: str | Mapping[str, Any], flag: str) -> str:
    """Return the text of the scaling *value* of *flag*, or "". Raises the ValueError of :class:`RopeScaling`."""
    return RopeScaling(value, flag).text if value else ""
