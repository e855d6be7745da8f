"""Configuration of rotary embeddings, as Hugging Face's files give it."""

import math
import reprlib
from dataclasses import dataclass, fields

from jpaged.models.field_types import Hf, check_types, require

ROPE_TYPES = ("default", "linear", "llama3", "yarn", "longrope")
DEFAULT_ROPE_THETA = 10000.0
ROPE = ("rope_theta", "rope_scaling", "rope_parameters")  # fields of a config about its rotary embedding
FACTORS = ("short_factor", "long_factor")  # lists of longrope
EXTENDING = ("linear", "yarn")  # rope types after which sequences may pass max_position_embeddings


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding as a Hugging Face config gives it: `rope_parameters`, or `rope_theta` and `rope_scaling`."""

    type: str = "default"
    theta: float = DEFAULT_ROPE_THETA
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    partial_rotary_factor: float = 1.0
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    is_long: bool = False  # whether longrope takes the long factors

    def __post_init__(self) -> None:
        check_types(self)
        share = self.partial_rotary_factor
        require(0 < share <= 1, "partial_rotary_factor", "above 0 and at most 1", f"{share:g}")
        for name, factors in (("short_factor", self.short_factor), ("long_factor", self.long_factor)):
            fits = all(type(factor) in (int, float) and 0 < factor < math.inf for factor in factors)
            require(fits, name, "numbers above 0", reprlib.repr(factors))
        if not (self.theta > 1 and self.factor > 0 and self.beta_fast > 0 and self.beta_slow > 0):
            raise ValueError(
                "rope_scaling: rope_theta must be above 1, and factor, beta_fast and beta_slow above 0, not "
                f"{self.theta:g}, {self.factor:g}, {self.beta_fast:g} and {self.beta_slow:g}"
            )
        if self.type == "llama3" and not self.high_freq_factor > self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor: must exceed low_freq_factor ({self.low_freq_factor:g}), "
                f"not {self.high_freq_factor:g}"
            )
        original = self.original_max_position_embeddings
        require(original >= (self.type != "default"), "original_max_position_embeddings", "at least 1", original)

    @classmethod
    def from_hf(cls, hf: Hf) -> "RopeConfig":
        """Return the rotary embedding of a config.json's content.

        Raises:
            ValueError: the rope type is not supported, or a value is invalid.
        """
        parameters = _parameters(hf)
        kind = parameters.get("rope_type", parameters.get("type", "default"))
        if kind == "dynamic":
            raise ValueError(
                "rope_type: 'dynamic' is not supported, because its frequencies change as a sequence grows and "
                f"cached keys would have to be rotated again; supported: {', '.join(ROPE_TYPES)}"
            )
        if kind not in ROPE_TYPES:
            raise ValueError(f"rope_type: {reprlib.repr(kind)} is not supported; supported: {', '.join(ROPE_TYPES)}")
        maximum = hf.get("max_position_embeddings", 2048)
        original = parameters["original_max_position_embeddings"] or maximum
        if parameters.get("factor") is None and kind in ("yarn", "longrope"):
            parameters["factor"] = maximum / original
        if parameters.get("factor") is None and kind != "default":
            raise ValueError(f"rope_type: {kind!r} needs 'factor'")
        if kind == "llama3" and not {"low_freq_factor", "high_freq_factor"} <= parameters.keys():
            raise ValueError("rope_type: 'llama3' needs 'low_freq_factor' and 'high_freq_factor'")
        if kind == "longrope":
            if not all(isinstance(parameters.get(name), list) for name in FACTORS):
                raise ValueError("rope_type: 'longrope' needs 'short_factor' and 'long_factor'")
            parameters |= {name: tuple(parameters[name]) for name in FACTORS}
        names = {each.name for each in fields(cls)} & parameters.keys()
        values = {name: parameters[name] for name in names if parameters[name] is not None}
        values |= {"type": kind, "theta": parameters["rope_theta"], "original_max_position_embeddings": original}
        return cls(**values | {"is_long": kind == "longrope" and maximum > original})


def _parameters(hf: Hf) -> Hf:
    """Return the parameters of the rotary embedding, wherever a config.json has them. Raises ValueError."""
    parts = [hf.get(name) or {} for name in ("rope_scaling", "rope_parameters")]
    if not all(isinstance(part, dict) for part in parts):
        raise ValueError(f"rope_scaling, rope_parameters: must be JSON objects, not {reprlib.repr(parts)}")
    parameters = parts[0] | parts[1]
    if any(isinstance(value, dict) for value in parameters.values()) or parameters.get("mrope_section"):
        raise ValueError("rope_parameters: only one rotary embedding of whole positions is supported")
    names = ("partial_rotary_factor", "original_max_position_embeddings")
    return {
        "rope_theta": hf.get("rope_theta", DEFAULT_ROPE_THETA),
        **{name: hf.get(name) for name in names},
        **parameters,
    }
