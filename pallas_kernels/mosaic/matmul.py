"""Products of rows with weights (Mosaic GPU, Hopper).

Operands are swapped, Y^T = W X^T: outputs are wgmma's M, and rows, of which a decode step has few, are its N. A weight
therefore crosses shared memory once for all rows of a tile, and numbers of 8 and 4 bits are converted in registers,
which may be wgmma's left operand.

A fixed number of thread blocks walk the tiles of the result. In each, one warpgroup copies, running ahead over the ends
of tiles, and the others compute 64 outputs each. The inputs of a weight are cut into parts, whose sums are added in
order. No cut of the inputs depends on the number of rows, so a row has the same bits in every batch.

Axis letters besides the package's: R tiles of rows, D parts of the inputs.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import reference, tuning
from pallas_kernels.mosaic.numbers import BITS, Groups, converted, factors_in, first_in
from pallas_kernels.mosaic.support import check_grid, compiler_params, num_sms, store_transposed
from pallas_kernels.options import Ref
from pallas_kernels.weights import Format

OUTPUTS = 64  # of a warpgroup: wgmma's M
REGISTERS = (224, 56)  # of a thread that computes and of one that copies, where they share 504
PIECE = 64  # rows that a warpgroup stores at once
ACTIVATIONS = ("silu", "gelu_pytorch_tanh", "relu", "swiglu_oai")  # that the kernel computes


class Inputs(NamedTuple):
    """Arguments of the kernel, as arrays or refs.

    Attributes:
        x_ti: [T, I], T a multiple of the rows of a tile.
        values: the numbers [E, O, I] of each weight, [E, O, I/2] if they are packed; E = 1 without experts.
        factors: scales and minima of groups of inputs, [E, O, groups], those of a weight after those of the one before.
        scales, biases: factors and addends of the sums, [E, O] float32 each; (): none.
        expert_r: [R] int32, the expert of each tile of rows; None: there are none.
        num_tiles: [1] int32, number of tiles of rows in use.
    """

    x_ti: Any
    values: tuple[Any, ...]
    factors: tuple[Any, ...] = ()
    scales: tuple[Any, ...] = ()
    biases: tuple[Any, ...] = ()
    expert_r: Any = None
    num_tiles: Any = None


class Ring(NamedTuple):
    """Ring of operands in shared memory, which one warpgroup fills and the others free.

    The filling warpgroup must be the only one in its thread of the kernel, as in `KVRing`.
    """

    x: Ref  # [stages, rows, depth]
    values: tuple[Ref, ...]  # [stages, outputs, depth] each, [stages, outputs, depth/2] if they are packed
    factors: tuple[Ref, ...]  # [stages, outputs, groups] each
    full: Ref  # barriers [stages]
    free: Ref

    @staticmethod
    def scratch(inputs: Inputs, cut: tuning.MosaicProduct, form: Format) -> "Ring":
        """Return the scratch types of a ring."""

        def tile(array: jax.Array, columns: int) -> Any:
            return plgpu.SMEM((cut.stages, OUTPUTS * cut.warpgroups, columns), array.dtype)

        def factors(array: jax.Array) -> Any:
            assert form.group is not None
            return tile(array, factors_in(cut.depth, form.group, array.dtype.itemsize))

        copies = 1 + len(inputs.values) + len(inputs.factors)
        return Ring(
            x=plgpu.SMEM((cut.stages, cut.rows, cut.depth), inputs.x_ti.dtype),
            values=tuple(tile(array, cut.depth // (1 + form.is_packed)) for array in inputs.values),
            factors=tuple(map(factors, inputs.factors)),
            full=plgpu.Barrier(num_arrivals=copies, num_barriers=cut.stages),
            free=plgpu.Barrier(num_arrivals=cut.warpgroups, num_barriers=cut.stages),
        )

    def fill(
        self, inputs: Inputs, *, form: Format, expert: jax.Array | int, row: jax.Array, output: jax.Array,
        start: jax.Array, depths: int, filled: jax.Array,
    ) -> jax.Array:  # fmt: skip
        """Take `depths` tiles of inputs from input `start` on through the ring; return how many went through it."""
        stages, rows, depth = self.x.shape
        outputs = self.values[0].shape[1]

        @pl.loop(0, depths)
        def fill_stage(i: jax.Array) -> None:
            stage = lax.rem(filled + i, stages)
            at = pl.ds(pl.multiple_of(start + i * depth, depth), depth)
            pl.when(filled + i >= stages)(lambda: plgpu.barrier_wait(self.free.at[stage]))
            for source, tile, of_column in self._copies(inputs, form):
                columns = tile.shape[2]
                first = pl.multiple_of(lax.div(start + i * depth, columns * of_column) * columns, columns)
                plgpu.copy_gmem_to_smem(
                    source.at[expert, pl.ds(output, outputs), pl.ds(first, columns)], tile.at[stage],
                    self.full.at[stage],
                )  # fmt: skip
            plgpu.copy_gmem_to_smem(inputs.x_ti.at[pl.ds(row, rows), at], self.x.at[stage], self.full.at[stage])

        return filled + depths

    def drain(self, filled: jax.Array) -> None:
        """Wait until all stages are free again: a barrier may not complete twice unobserved."""
        stages = self.x.shape[0]

        @pl.loop(jnp.maximum(filled - stages, 0), filled)
        def drain_stage(n: jax.Array) -> None:
            plgpu.barrier_wait(self.free.at[lax.rem(n, stages)])

    def sums(self, own: Any, depths: int, filled: jax.Array, start: jax.Array | int, form: Format) -> list[jax.Array]:
        """Return the sums [64, rows] float32 over the next `depths` stages for each weight, and free the stages.

        Args:
            own: the 64 outputs of a tile.
            start: the first input.
        """
        stages, rows, depth = self.x.shape
        converts = jnp.dtype(form.dtype) != self.x.dtype
        of_each = len(self.factors) // len(self.values)

        def multiply_converted(acc: Ref, weight: int, stage: jax.Array, i: jax.Array) -> None:
            refs = self.factors[weight * of_each : (weight + 1) * of_each]
            firsts = [first_in(ref.shape[2], start + i * depth, depth, form.group or depth) for ref in refs]
            factors = [Groups(ref.at[stage, own], first) for ref, first in zip(refs, firsts, strict=True)]
            for at, piece in converted(self.values[weight].at[stage, own], form, self.x.dtype, factors):
                plgpu.wgmma(acc, piece, self.x.at[stage, :, pl.ds(at, piece.shape[1])].T)
                plgpu.wgmma_wait(0)

        def scoped(*accs: Ref) -> list[jax.Array]:
            @pl.loop(0, depths)
            def multiply(i: jax.Array) -> None:
                stage = lax.rem(filled + i, stages)
                plgpu.barrier_wait(self.full.at[stage])
                for weight, acc in enumerate(accs):
                    if converts:
                        multiply_converted(acc, weight, stage, i)
                    else:
                        plgpu.wgmma(acc, self.values[weight].at[stage, own], self.x.at[stage].T)
                if converts:
                    plgpu.commit_smem()  # all warps have read the numbers
                    plgpu.barrier_arrive(self.free.at[stage])
                else:
                    plgpu.wgmma_wait(len(accs))  # products of the stage before are complete
                    pl.when(i > 0)(lambda: plgpu.barrier_arrive(self.free.at[lax.rem(filled + i - 1, stages)]))

            return [acc[...] for acc in accs]

        sums: list[jax.Array] = pl.run_scoped(scoped, *[plgpu.ACC((OUTPUTS, rows), jnp.float32)] * len(self.values))
        if not converts:
            plgpu.barrier_arrive(self.free.at[lax.rem(filled + depths - 1, stages)])
        return sums

    def _copies(self, inputs: Inputs, form: Format) -> Iterator[tuple[Ref, Ref, int]]:
        """Yield each array of the weights with its tile and the number of inputs of a column."""
        for source, tile in zip(inputs.values, self.values, strict=True):
            yield source, tile, 1 + form.is_packed
        for source, tile in zip(inputs.factors, self.factors, strict=True):
            assert form.group is not None
            yield source, tile, form.group


def _kernel(
    inputs: Inputs,
    y_dto_ref: Ref,  # D = 1 unless the parts are separate
    *,
    y_smem: Ref,  # [warpgroups, rows of a piece, 64]
    ring: Ring,
    cut: tuning.MosaicProduct,
    parts: int,
    thread_blocks: int,
    activation: str | None,
    form: Format,
) -> None:
    rows, outputs = cut.rows, OUTPUTS * cut.warpgroups
    separate, t, o = y_dto_ref.shape
    row_tiles = t // rows if inputs.num_tiles is None else inputs.num_tiles[0]
    depths = inputs.x_ti.shape[1] // cut.depth // parts
    steps = pl.cdiv(row_tiles * (o // outputs * separate) - lax.axis_index("c"), thread_blocks)
    wg = lax.axis_index("wg")
    # Sums in 128 registers leave a thread too few to convert numbers with.
    converts = jnp.dtype(form.dtype) != inputs.x_ti.dtype
    sums = cut.rows * len(inputs.values) * min(2, parts // separate)
    moves_registers = converts and cut.warpgroups == 2 and sums >= 256

    def work(step: jax.Array) -> tuple[jax.Array, ...]:
        """Return the part of the inputs, the tile of rows and the first output of a step of this thread block."""
        at = lax.axis_index("c") + step * thread_blocks
        rest, row_tile = lax.div(at, row_tiles), lax.rem(at, row_tiles)
        return lax.rem(rest, separate), row_tile, pl.multiple_of(lax.div(rest, separate) * outputs, outputs)

    def expert(tile: jax.Array) -> jax.Array | int:
        return 0 if inputs.expert_r is None else inputs.expert_r[tile]

    @pl.when(wg < cut.warpgroups)
    def compute() -> None:
        if moves_registers:
            plgpu.set_max_registers(REGISTERS[0], action="increase")
        own = pl.ds(pl.multiple_of(wg * OUTPUTS, OUTPUTS), OUTPUTS)

        def of_outputs(operation: Any, x: jax.Array, ref: Ref, at: tuple[Any, ...]) -> jax.Array:
            layout = plgpu.Layout.WGMMA
            x_o = plgpu.load(ref.at[at], layout=layout.reduce(1), optimized=False)
            out: jax.Array = operation(x, plgpu.layout_cast(lax.broadcast_in_dim(x_o, x.shape, [0]), layout))
            return out

        def finished(sums: list[jax.Array], at: tuple[Any, ...]) -> jax.Array:
            for operation, refs in (jnp.multiply, inputs.scales), (jnp.add, inputs.biases):
                if refs:
                    sums = [of_outputs(operation, x, ref, at) for x, ref in zip(sums, refs, strict=True)]
            if len(sums) == 2:
                return reference.gated(activation, *sums)
            return reference.ACTIVATIONS[activation](sums[0]) if activation else sums[0]

        def tile(step: jax.Array, filled: jax.Array) -> jax.Array:
            part, row_tile, output = work(step)
            several = parts // separate

            def of_part(n: jax.Array | int) -> list[jax.Array]:
                start = (part * several + n) * depths * cut.depth
                return ring.sums(own, depths, filled + n * depths, start, form)

            def add_part(n: jax.Array, sums: list[jax.Array]) -> list[jax.Array]:
                return [a + b for a, b in zip(sums, of_part(n), strict=True)]

            sums = lax.fori_loop(1, several, add_part, of_part(0)) if several > 1 else of_part(0)
            filled += several * depths
            columns = pl.ds(pl.multiple_of(output + wg * OUTPUTS, OUTPUTS), OUTPUTS)
            y = finished(sums, (expert(row_tile), columns)).astype(y_smem.dtype)
            size = y_smem.shape[1]
            for at in range(0, rows, size):
                own_rows = pl.ds(pl.multiple_of(row_tile * rows + at, size), size)
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # of the last piece
                store_transposed(y_smem.at[wg], y[:, at : at + size])
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(y_smem.at[wg], y_dto_ref.at[part, own_rows, columns])
            return filled

        lax.fori_loop(0, steps, tile, jnp.int32(0))
        plgpu.wait_smem_to_gmem(0)

    @pl.when(wg == cut.warpgroups)
    def copy() -> None:
        if moves_registers:
            plgpu.set_max_registers(REGISTERS[1], action="decrease")

        def tile(step: jax.Array, filled: jax.Array) -> jax.Array:
            part, row_tile, output = work(step)
            several = depths * (parts // separate)
            return ring.fill(
                inputs, form=form, expert=expert(row_tile), row=pl.multiple_of(row_tile * rows, rows), output=output,
                start=part * depths * cut.depth, depths=several, filled=filled,
            )  # fmt: skip

        ring.drain(lax.fori_loop(0, steps, tile, jnp.int32(0)))


def launch(
    inputs: Inputs, dtype: Any, *, form: Format, cut: tuning.MosaicProduct, parts: int = 1, separate: bool = False,
    activation: str | None = None,
) -> jax.Array:  # fmt: skip
    """Compute the product of rows with a weight, or the gated product with two.

    Args:
        form: the form of the weights.
        parts: of the inputs. Their sums are added in order.
        separate: return the sums of the parts instead.

    Returns:
        [1, T, O] of a dtype, or [parts, T, O] float32 if they are separate.
    """
    (t, i), o = inputs.x_ti.shape, inputs.values[0].shape[1]
    outputs = OUTPUTS * cut.warpgroups
    assert t % cut.rows == 0 and o % outputs == 0 and i % (parts * cut.depth) == 0, (inputs.x_ti.shape, o, cut)
    out = jax.ShapeDtypeStruct((parts if separate else 1, t, o), jnp.float32 if separate else dtype)
    thread_blocks = min(t // cut.rows * (o // outputs) * out.shape[0], cut.blocks_per_sm * num_sms())
    check_grid("product", (thread_blocks,))
    if form.dtype in BITS:
        bits = tuple(lax.bitcast_convert_type(array, jnp.int8) for array in inputs.values)
        inputs = inputs._replace(values=bits)
    leaves, structure = jax.tree.flatten(inputs)
    settings = dict(form=form, cut=cut, parts=parts, thread_blocks=thread_blocks, activation=activation)

    def kernel(*refs: Ref, **scratch: Any) -> None:
        _kernel(jax.tree.unflatten(structure, refs[:-1]), refs[-1], **scratch, **settings)

    y_dto: jax.Array = plgpu.kernel(
        kernel,
        out_type=out,
        grid=(thread_blocks,),
        grid_names=("c",),
        num_threads=cut.warpgroups + 1,
        thread_name="wg",
        scratch_types=dict(
            y_smem=plgpu.SMEM((cut.warpgroups, min(cut.rows, PIECE), OUTPUTS), out.dtype),
            ring=Ring.scratch(inputs, cut, form),
        ),
        compiler_params=compiler_params(unsafe_no_auto_barriers=True),
        kernel_name="product",
    )(*leaves)
    return y_dto
