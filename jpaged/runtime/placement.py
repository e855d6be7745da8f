"""Places of an engine's arrays on one device or on a mesh of several, which share the model by its heads."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import jax
import numpy as np
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jpaged.models.base import Model
from jpaged.models.config import ModelConfig
from jpaged.models.quantized import check_groups
from jpaged.runtime.mesh import mesh_shape

ALL = KV, GROUP = "kv", "group"  # axes of the mesh
# Axes of the mesh by the names of parameters' axes; a parameter is whole along the others.
AXES: dict[str | None, Any] = {"heads": ALL, "kv_heads": KV, "mlp": ALL, "vocab": ALL}


@dataclass(frozen=True)
class Placement:
    """Places of parameters, KV pool and small arrays on a mesh of two axes.

    KV heads are divided along `kv`. If there are fewer of them than devices, the query heads of a KV head are divided
    along `group`, and its keys and values are repeated there. Heads, MLP and vocabulary are divided by both, as in
    Megatron-LM (arXiv 1909.08053). One device is a mesh of one.

    Attributes:
        mesh: its axes are partitioned by XLA (`AxisType.Auto`), so the model and its caller need no context.
        splits_vocab: whether the vocabulary is divided too. A vocabulary that the number of devices does not divide is
            whole on each device.
    """

    mesh: Mesh
    splits_vocab: bool

    @classmethod
    def on(cls, devices: Sequence[jax.Device], model: ModelConfig) -> Self:
        """Return the placement of a model on devices; errors are those of `mesh_shape`."""
        grid = np.asarray(devices).reshape(mesh_shape(model, len(devices)))
        mesh = Mesh(grid, ALL, axis_types=(AxisType.Auto,) * 2)
        return cls(mesh, mesh.size > 1 and model.vocab_size % mesh.size == 0)

    @property
    def devices(self) -> list[jax.Device]:
        """The devices of the mesh, in its order."""
        return list(self.mesh.devices.flat)

    @property
    def local_devices(self) -> list[jax.Device]:
        """The devices of the mesh that belong to this process: all, unless several processes share the mesh."""
        return [device for device in self.devices if device.process_index == jax.process_index()]

    @property
    def device(self) -> jax.Device:
        """The first device of this process."""
        return self.local_devices[0]

    @property
    def platform(self) -> str:
        """The platform of the devices, such as "cpu"."""
        return str(self.devices[0].platform)

    @property
    def num_processes(self) -> int:
        """The number of processes that share the mesh."""
        return len({device.process_index for device in self.devices})

    @property
    def size(self) -> int:
        """The number of devices."""
        return self.mesh.size

    @property
    def kv_size(self) -> int:
        """The number of parts of the KV heads."""
        return len(self.mesh.devices)

    @cached_property
    def whole(self) -> NamedSharding:
        """Sharding of an array that every device has whole."""
        return NamedSharding(self.mesh, P())

    @cached_property
    def pool(self) -> NamedSharding:
        """Sharding of the arrays of a KV pool, [P, K, B, H], and of a block that is moved, [2L, K, B, H]."""
        return NamedSharding(self.mesh, P(None, KV))

    def of(self, variable: nnx.Variable[Any]) -> NamedSharding:
        """Return the sharding of a parameter, by the names of its axes."""
        return self.of_axes(*(variable.get_metadata().get("out_sharding") or ()))

    def of_axes(self, *names: str | None) -> NamedSharding:
        """Return the sharding of an array by the names of its axes."""
        axes = (None if name == "vocab" and not self.splits_vocab else AXES.get(name) for name in names)
        return NamedSharding(self.mesh, P(*axes))

    def put(self, values: Any) -> Any:
        """Copy a tree of host arrays to every device, and return it as jax arrays.

        Processes that share the mesh pass the same values. `device_put` would compare the values in a collective.
        """
        if not self.mesh.is_multi_process:
            return jax.device_put(values, self.whole)
        from_array = jax.make_array_from_callback
        arrays = jax.tree.map(np.asarray, values)
        return jax.tree.map(lambda array: from_array(array.shape, self.whole, array.__getitem__), arrays)


def shard(model: Model, devices: Sequence[jax.Device]) -> Model:
    """Return a model with its parameters divided among devices, as an engine serves it on them.

    Parameters are divided along the axes that `out_sharding` names "heads", "kv_heads", "mlp" or "vocab", and are whole
    on each device without such a name. Parameters with this placement are not copied.

    Raises:
        ValueError: this number of devices can't share the model.
    """
    placement = Placement.on(devices, model.config)
    graphdef, state = nnx.split(model)
    check_groups(dict(nnx.to_flat_state(state)), placement.of)
    leaves = [
        (path, leaf.replace(jax.device_put(leaf.get_value(), placement.of(leaf))))
        for path, leaf in nnx.to_flat_state(state)
    ]
    return nnx.merge(graphdef, nnx.from_flat_state(leaves))


def padded(pairs: Sequence[tuple[int, int]], sizes: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return sources and destinations, [C] int32 each, C the smallest sufficient one of `sizes`, -1 past the pairs."""
    size = next(size for size in sizes if size >= len(pairs))
    array = np.full((2, size), -1, np.int32)
    array[:, : len(pairs)] = np.asarray(pairs, np.int32).T
    return array[0], array[1]


def form_of(array: jax.Array) -> jax.ShapeDtypeStruct:
    """Return the shape, the dtype and the place of an array."""
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)


def usable(arrays: Iterable[jax.Array]) -> bool:
    """Return whether no array was donated, and none is the result of a computation that failed on the device."""
    try:
        for array in arrays:
            array.block_until_ready()
    except RuntimeError:  # jax.errors.JaxRuntimeError in both cases
        return False
    return True


def devices_of(arrays: Iterable[jax.Array]) -> list[jax.Device]:
    """Return the devices that hold a module's arrays, in the order of its mesh if it has one."""
    sharding = next(iter(arrays)).sharding
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
        return list(sharding.mesh.devices.flat)
    return sorted(sharding.device_set, key=lambda device: device.id)
