"""Shape of the mesh of devices that share a model."""

import math
from typing import NamedTuple

from jpaged.models.config import ModelConfig


class MeshShape(NamedTuple):
    """Numbers of devices along the two axes of a mesh: parts of the KV heads, and devices that repeat one part."""

    kv: int
    group: int

    @property
    def size(self) -> int:
        """Number of devices."""
        return self.kv * self.group


def mesh_shape(model: ModelConfig, size: int) -> MeshShape:
    """Return the shape of a mesh of `size` devices.

    Raises:
        ValueError: this number of devices can't share the model; the message has the sizes.
    """
    num_kv_heads = model.num_key_value_heads
    divided = {name: getattr(model, name) for name in ("num_attention_heads", "intermediate_size")}
    if model.variation.experts is not None:
        divided["moe_intermediate_size"] = model.variation.experts.intermediate_size
        divided["shared_expert_intermediate_size"] = model.variation.experts.shared_size
    for name, count in divided.items():
        if count % size:
            raise ValueError(f"tensor_parallel_size: must divide {name} ({count}) of the model, not {size}")
    if num_kv_heads % size and size % num_kv_heads:
        raise ValueError(
            f"tensor_parallel_size: must divide num_key_value_heads ({num_kv_heads}) of the model or be a multiple "
            f"of it, not {size}"
        )
    kv = math.gcd(num_kv_heads, size)
    return MeshShape(kv, size // kv)
