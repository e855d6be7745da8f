"""Products of rows with weights: their cut into tiles, and the rows of experts (Mosaic GPU, Hopper)."""

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import reference
from pallas_kernels.mosaic.matmul import ACTIVATIONS, OUTPUTS, PIECE, Inputs, launch
from pallas_kernels.mosaic.numbers import factor_bytes, whole_copies
from pallas_kernels.mosaic.support import num_sms
from pallas_kernels.options import ProductOptions
from pallas_kernels.transforms import no_vmap, with_derivatives
from pallas_kernels.tuning import MosaicProduct
from pallas_kernels.weights import PACKED, Format, Weight

NUMBERS = ("int8", "float8_e4m3fn", "uint8")  # dtypes of weights besides that of the rows
INPUTS = 64  # a number of inputs is a multiple
DEPTHS = (4 * INPUTS, 2 * INPUTS, INPUTS)  # of a tile
LEAST_ROWS = 8  # of a tile: the least N of wgmma
WAVE = 96  # tiles of outputs that keep a GPU of 132 multiprocessors busy
MIN_INPUTS = 1024  # that are cut again
MEMORY = 225 * 1024  # bytes of a multiprocessor's shared memory for operands and results
MIN_STAGES, MAX_STAGES = 3, 8


def product(x_ti: jax.Array, weights: tuple[Weight, ...], options: ProductOptions) -> tuple[jax.Array, ...]:
    """Compute `Ops.product` and `Ops.products` of rows in bfloat16 or float16; the reference computes the rest.

    Numbers of 8 bits become exact numbers of the rows' dtype. Sums are float32, in one order for any number of rows.
    """
    if options.int8_rows or unsupported_product(x_ti, weights, gated=options.gated):
        return reference.product(x_ti, weights, options)
    return _multiply(x_ti, weights, options)


@with_derivatives(reference.product)
def _multiply(x_ti: jax.Array, weights: tuple[Weight, ...], options: ProductOptions) -> tuple[jax.Array, ...]:
    """Compute the products of weights that the kernel takes."""
    x_ti, weights = no_vmap("product in Mosaic", (x_ti, weights))
    if options.residual_to is not None:
        (y_to,) = _multiply(x_ti, weights, replace(options, residual_to=None))
        return (options.residual_to + y_to,)
    if options.activation not in (None, *ACTIVATIONS) or options.added is not None:
        plain = replace(options, activation=None, gated=False, dtype=jnp.float32, added=None)
        sums = [_product(x_ti, (weight._replace(bias=None),), plain) for weight in weights]
        return reference.finished(sums, weights, options, x_ti.dtype)
    if options.gated:
        return (_product(x_ti, weights, options),)
    return tuple(_product(x_ti, (weight,), options) for weight in weights)


def unsupported_product(x_ti: jax.Array, weights: Sequence[Weight], *, gated: bool = False) -> str | None:
    """Return the reason why the kernel can't multiply rows by some weights; None if it can."""
    for weight in weights:
        if reason := unsupported_weight(weight.format, weight.shape, str(x_ti.dtype)):
            return reason
    forms = {(weight.format, weight.bias is None) for weight in weights}
    return "a gate has weights of two forms" if gated and len(forms) > 1 else None if len(x_ti) else "there are no rows"


def unsupported_weight(form: Format, shape: tuple[int, int], dtype: str) -> str | None:
    """Return the reason why the kernel can't multiply rows in a dtype by a weight [O, I] in a form; None if it can."""
    (outputs, inputs), group, least = shape, form.group or INPUTS, PACKED if form.is_packed else PACKED // 2
    if dtype not in ("bfloat16", "float16"):
        return f"rows are {dtype}, expected bfloat16 or float16"
    if form.is_mxfp4 and dtype != "bfloat16":
        return f"rows are {dtype}, expected bfloat16 for exponents of weights in MXFP4"
    if group % least or (DEPTHS[0] % group and group % DEPTHS[0]):
        return f"groups have {group} inputs, expected a multiple of {least} and a part or multiple of {DEPTHS[0]}"
    if form.dtype != dtype and (form.dtype not in NUMBERS or (form.dtype == "float8_e4m3fn" and dtype != "bfloat16")):
        return f"weights are {form.dtype} and rows {dtype}"
    if not outputs or outputs % OUTPUTS or inputs % INPUTS:
        return f"a weight has {outputs} outputs and {inputs} inputs, expected multiples of {OUTPUTS} and {INPUTS}"
    return None


class ExpertRows(NamedTuple):
    """Rows sorted by expert, moved so that each tile of rows belongs to one expert.

    Attributes:
        expert_r: [R] int32, the expert of each tile.
        num_tiles: [1] int32, number of tiles in use.
        source_p: [P] int32, the row that stands at each place of the tiles; places without one repeat some row.
        place_m: [M] int32, the place of each row.
    """

    expert_r: jax.Array
    num_tiles: jax.Array
    source_p: jax.Array
    place_m: jax.Array


def expert_rows(sizes_e: jax.Array, num_rows: int, tile: int) -> ExpertRows:
    """Return the places of `num_rows` sorted rows of experts, [E] int32 rows each, in tiles."""
    most = num_rows // tile + min(len(sizes_e), num_rows)
    tiles_e = -(-sizes_e // tile)
    last_tile_e, last_row_e = _running_sums(tiles_e), _running_sums(sizes_e)
    first_tile_e, first_row_e = last_tile_e - tiles_e, last_row_e - sizes_e
    expert_r = _interval_of(jnp.arange(most), last_tile_e)
    offset_p = (jnp.arange(most)[:, None] - first_tile_e[expert_r][:, None]) * tile + jnp.arange(tile)
    source_p = (first_row_e[expert_r][:, None] + offset_p).reshape(-1).clip(max=num_rows - 1)
    row_m = jnp.arange(num_rows)
    expert_m = _interval_of(row_m, last_row_e)
    place_m = row_m - first_row_e[expert_m] + first_tile_e[expert_m] * tile
    return ExpertRows(expert_r, last_tile_e[-1:], source_p, place_m)


def _running_sums(x_e: jax.Array) -> jax.Array:
    """Return cumulative sums [E], in one small kernel."""
    earlier_ee = jnp.tril(jnp.ones((len(x_e), len(x_e)), bool))
    return jnp.where(earlier_ee, x_e, 0).sum(axis=1)


def _interval_of(x_n: jax.Array, ends_e: jax.Array) -> jax.Array:
    """Return the first interval that ends after each number, [N] int32, by comparisons: a search would be a loop."""
    return (x_n[:, None] >= ends_e).sum(axis=1, dtype=jnp.int32).clip(max=len(ends_e) - 1)


def parts_of(weight: Weight) -> int:
    """Return the number of parts of the inputs of a weight, which give a GPU enough tiles if there are few rows."""
    (outputs, inputs), parts = weight.shape, 1
    tiles = WAVE if weight.values.dtype.itemsize > 1 else 2 * WAVE  # conversions keep more warps busy
    while outputs // OUTPUTS * parts < tiles and inputs % (2 * parts * INPUTS) == 0 and inputs // parts >= MIN_INPUTS:
        parts *= 2
    return parts


def cut_of(rows: int, weights: Sequence[Weight], dtype: Any, parts: int) -> MosaicProduct:
    """Return the cut of a product into tiles for about this number of rows, of an expert if there are several.

    Timed on an H200 with a weight of 6,144 x 4,096 and with experts of 768 x 2,048; see docs/kernels.md.
    """
    (outputs, inputs), form = weights[0].shape, weights[0].format
    converts = jnp.dtype(form.dtype) != dtype
    size = next((size for size in (LEAST_ROWS, 16, 32, 64) if size >= rows), 128)
    warpgroups = 2 if size > 32 and outputs % (2 * OUTPUTS) == 0 else 1
    if rows >= 1024 and warpgroups == 2 and len(weights) == parts == 1 and not converts:
        size = 256
    if warpgroups == 1 and len(weights) * parts > 1:  # two thread blocks share the registers
        size = min(size, 64 // len(weights))
    blocks_per_sm = 2 // warpgroups
    result = 4 * OUTPUTS * warpgroups * min(size, PIECE)

    def stage_bytes(depth: int) -> int:
        of_output = depth * jnp.dtype(form.dtype).itemsize // (1 + form.is_packed) + factor_bytes(depth, form)
        return int(OUTPUTS * warpgroups * len(weights) * of_output + depth * size * jnp.dtype(dtype).itemsize)

    # Conversions take fewer steps of the loop, where two thread blocks leave enough registers.
    deep = (size <= 16 or (form.is_packed and size == 64)) if form.group else size <= 32
    deepest = INPUTS if size > 64 else 4 * INPUTS if converts and deep else 2 * INPUTS
    for depth in DEPTHS:
        stages = min(MAX_STAGES, (MEMORY // blocks_per_sm - result) // stage_bytes(depth))
        if depth <= deepest and inputs // parts % depth == 0 and stages >= MIN_STAGES:
            break
    return MosaicProduct(size, warpgroups, depth, stages, blocks_per_sm)


def _product(x_ti: jax.Array, weights: tuple[Weight, ...], options: ProductOptions) -> jax.Array:
    """Compute the product with one weight, or the gated product with two."""
    num_rows, dtype, sizes_e = len(x_ti), jnp.dtype(options.dtype or x_ti.dtype), options.sizes_e
    inputs = _inputs(x_ti, weights, of_experts=sizes_e is not None)
    # XLA might round the last steps of a sum otherwise than the kernel, so it takes only one of them.
    several = bool(inputs.scales and inputs.biases) or options.gated or options.activation is not None
    parts = 1 if several or sizes_e is not None else parts_of(weights[0])
    cut = cut_of(num_rows if sizes_e is None else -(-num_rows // len(sizes_e)), weights, x_ti.dtype, parts)
    multiply = functools.partial(launch, form=weights[0].format, cut=cut)
    if sizes_e is not None:
        rows = expert_rows(sizes_e, num_rows, cut.rows)
        inputs = inputs._replace(x_ti=x_ti[rows.source_p], expert_r=rows.expert_r, num_tiles=rows.num_tiles)
        return multiply(inputs, dtype, activation=options.activation)[0, rows.place_m]
    inputs = inputs._replace(x_ti=jnp.pad(x_ti, ((0, -num_rows % cut.rows), (0, 0))))
    tiles = len(inputs.x_ti) // cut.rows * (weights[0].shape[0] // (OUTPUTS * cut.warpgroups))
    if parts == 1 or 2 * tiles > num_sms():
        return multiply(inputs, dtype, parts=parts, activation=options.activation)[0, :num_rows]
    sums_dto = multiply(inputs._replace(scales=(), biases=()), dtype, parts=parts, separate=True)[:, :num_rows]
    y_to = functools.reduce(jnp.add, list(sums_dto))
    y_to = y_to * inputs.scales[0] if inputs.scales else y_to
    y_to = y_to + inputs.biases[0] if inputs.biases else y_to
    return y_to.astype(dtype)


def _inputs(x_ti: jax.Array, weights: tuple[Weight, ...], *, of_experts: bool) -> Inputs:
    """Return the inputs of the kernel; a weight without experts is that of one."""

    def arrays(name: str, dtype: Any = None) -> tuple[jax.Array, ...]:
        found = [array for weight in weights if (array := getattr(weight, name)) is not None]
        return tuple((array if of_experts else array[None]).astype(dtype or array.dtype) for array in found)

    inputs = Inputs(x_ti, arrays("values"), biases=arrays("bias", jnp.float32))
    if not weights[0].has_groups:
        return inputs._replace(scales=arrays("scales", jnp.float32))
    factors = [factors for name in ("scales", "minima") if (factors := arrays(name))]
    return inputs._replace(factors=tuple(whole_copies(array) for of_weight in zip(*factors) for array in of_weight))
