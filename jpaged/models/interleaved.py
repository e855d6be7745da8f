"""Tensors of experts that hold the outputs of several weights in turn, as transformers stores those of gpt-oss.

A tensor [E, in, n out] holds n weights [E, out, in], and a tensor [E, n out] holds n biases [E, out].
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import numpy as np

from jpaged.models.base import Interleaved
from jpaged.models.safetensors_files import DerivedTensor, StoredTensor, StoredTensors

PlaceOf = Callable[[str], Interleaved | None]  # as `Architecture.interleaved`


def separated(tensors: StoredTensors, names: Iterable[str], place_of: PlaceOf) -> dict[str, StoredTensor]:
    """Return the tensors of a checkpoint, with weights and biases of these names in the place of those in turn."""
    found, used = {}, set()
    for name in names:
        place = place_of(name)
        tensor = tensors.get(place.name) if place else None
        if not place or not tensor or len(shape := tensor.get_shape()) not in (2, 3) or shape[-1] % place.parts:
            continue
        used.add(place.name)
        experts, *inputs, outputs = shape
        read = partial(_read, tensor, place)
        found[name] = DerivedTensor((experts, outputs // place.parts, *inputs), tensor.get_dtype(), read)
    return {name: tensor for name, tensor in tensors.items() if name not in used} | found


def _read(tensor: StoredTensor, place: Interleaved, index: Sequence[slice]) -> np.ndarray:
    """Return a part of a weight [E, out, in] or of a bias [E, out]."""
    experts, outputs, *inputs = index
    low, high, _ = outputs.indices(tensor.get_shape()[-1] // place.parts)
    stored = np.asarray(tensor[(experts, *inputs, slice(low * place.parts, high * place.parts))])
    own = stored[..., place.place :: place.parts]
    return own.swapaxes(1, 2) if inputs else own


def members(names: Iterable[str], place_of: PlaceOf) -> dict[str, list[str]]:
    """Return the weights and biases that each tensor of a checkpoint holds in turn, by its name."""
    places = {name: place for name in names if (place := place_of(name))}
    found: dict[str, list[str]] = {}
    for name in sorted(places, key=lambda name: places[name].place):
        found.setdefault(places[name].name, []).append(name)
    return found


def joined_shapes(shapes: Mapping[str, tuple[int, ...]], place_of: PlaceOf) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors of a checkpoint, for those of separate weights and biases."""
    of_stored = members(shapes, place_of)
    separate = {name for names in of_stored.values() for name in names}
    stored = {name: shape for name, shape in shapes.items() if name not in separate}
    for name, (first, *others) in of_stored.items():
        experts, outputs, *inputs = shapes[first]
        stored[name] = (experts, *inputs, outputs * (1 + len(others)))
    return stored


def joined(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Return a tensor of a checkpoint from its weights [E, out, in] or biases [E, out]."""
    in_turn = np.stack([array.swapaxes(1, 2) if array.ndim == 3 else array for array in arrays], axis=-1)
    return np.ascontiguousarray(in_turn.reshape(*in_turn.shape[:-2], -1))
