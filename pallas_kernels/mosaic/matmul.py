"""Products of rows with weights (Mosaic GPU, Hopper).

Operands are swapped, Y^T = W X^T: outputs are wgmma's M, and rows, of which a decode step has few, are its N. A weight
therefore crosses shared memory once for all rows of a tile, and numbers of 8 bits are converted in registers, which may
be wgmma's left operand.

A fixed number of thread blocks walk the tiles of the result. In each, one warpgroup copies, running ahead over the ends
of tiles, and the others compute 64 outputs each. The inputs of a weight are cut into parts, whose sums are added in
order. No cut of the inputs depends on the number of rows, so a row has the same bits in every batch.

Axis letters besides the package's: R tiles of rows, D parts of the inputs.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import reference, tuning
from pallas_kernels.checks import FP8
from pallas_kernels.mosaic.support import check_grid, compiler_params, num_sms, store_transposed
from pallas_kernels.options import Ref

OUTPUTS = 64  # of a warpgroup: wgmma's M
REGISTERS = (224, 56)  # of a thread that computes and of one that copies, where they share 504
PIECE = 64  # rows that a warpgroup stores at once
ACTIVATIONS = ("silu", "gelu_pytorch_tanh", "relu")  # that the kernel computes


class Inputs(NamedTuple):
    """Arguments of the kernel, as arrays or refs.

    Attributes:
        x_ti: [T, I], T a multiple of the rows of a tile.
        values: the numbers [E, O, I] of each weight; E = 1 without experts.
        scales, biases: factors of the sums and what is added to them, [E, O] float32 each; (): none.
        expert_r: [R] int32, the expert of each tile of rows; None: there are none.
        num_tiles: [1] int32, number of tiles of rows in use.
    """

    x_ti: Any
    values: tuple[Any, ...]
    scales: tuple[Any, ...] = ()
    biases: tuple[Any, ...] = ()
    expert_r: Any = None
    num_tiles: Any = None


class Ring(NamedTuple):
    """Ring of operands in shared memory, which one warpgroup fills and the others free.

    The filling warpgroup must be the only one in its thread of the kernel, as in `KVRing`.
    """

    x: Ref  # [stages, rows, depth]
    values: tuple[Ref, ...]  # [stages, outputs, depth] each
    full: Ref  # barriers [stages]
    free: Ref

    @staticmethod
    def scratch(inputs: Inputs, cut: tuning.MosaicProduct) -> "Ring":
        """Return the scratch types of a ring."""
        tile = functools.partial(plgpu.SMEM, (cut.stages, OUTPUTS * cut.warpgroups, cut.depth))
        return Ring(
            x=plgpu.SMEM((cut.stages, cut.rows, cut.depth), inputs.x_ti.dtype),
            values=tuple(tile(array.dtype) for array in inputs.values),
            full=plgpu.Barrier(num_arrivals=1 + len(inputs.values), num_barriers=cut.stages),
            free=plgpu.Barrier(num_arrivals=cut.warpgroups, num_barriers=cut.stages),
        )

    def fill(
        self, inputs: Inputs, *, expert: jax.Array | int, row: jax.Array, output: jax.Array, start: jax.Array,
        depths: int, filled: jax.Array,
    ) -> jax.Array:  # fmt: skip
        """Take `depths` tiles of inputs from input `start` on through the ring; return how many went through it."""
        stages, rows, depth = self.x.shape
        outputs = self.values[0].shape[1]

        @pl.loop(0, depths)
        def fill_stage(i: jax.Array) -> None:
            stage = lax.rem(filled + i, stages)
            at = pl.ds(pl.multiple_of(start + i * depth, depth), depth)
            pl.when(filled + i >= stages)(lambda: plgpu.barrier_wait(self.free.at[stage]))
            for source, tile in zip(inputs.values, self.values, strict=True):
                plgpu.copy_gmem_to_smem(
                    source.at[expert, pl.ds(output, outputs), at], tile.at[stage], self.full.at[stage]
                )
            plgpu.copy_gmem_to_smem(inputs.x_ti.at[pl.ds(row, rows), at], self.x.at[stage], self.full.at[stage])

        return filled + depths

    def drain(self, filled: jax.Array) -> None:
        """Wait until all stages are free again: a barrier may not complete twice unobserved."""
        stages = self.x.shape[0]

        @pl.loop(jnp.maximum(filled - stages, 0), filled)
        def drain_stage(n: jax.Array) -> None:
            plgpu.barrier_wait(self.free.at[lax.rem(n, stages)])

    def sums(self, own: Any, depths: int, filled: jax.Array, is_fp8: bool) -> list[jax.Array]:
        """Return the sums [64, rows] float32 over the next `depths` stages for each weight, and free the stages."""
        stages, rows, _ = self.x.shape
        converts = self.values[0].dtype != self.x.dtype

        def scoped(*accs: Ref) -> list[jax.Array]:
            @pl.loop(0, depths)
            def multiply(i: jax.Array) -> None:
                stage = lax.rem(filled + i, stages)
                plgpu.barrier_wait(self.full.at[stage])
                for acc, values in zip(accs, self.values, strict=True):
                    if converts:
                        plgpu.wgmma(acc, self._converted(values.at[stage, own], is_fp8), self.x.at[stage].T)
                        plgpu.wgmma_wait(0)
                    else:
                        plgpu.wgmma(acc, values.at[stage, own], self.x.at[stage].T)
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

    def _converted(self, tile: Ref, is_fp8: bool) -> jax.Array:
        """Return numbers of 8 bits in x's dtype; those of fp8 are given by their bits."""
        numbers = plgpu.load(tile, layout=plgpu.Layout.WGMMA_UPCAST_2X)  # 4 neighbours in each thread
        numbers = plgpu.layout_cast(numbers, plgpu.Layout.WGMMA)
        if not is_fp8:
            whole: jax.Array = numbers.astype(self.x.dtype)
            return whole
        # The exponent and mantissa of e4m3 are those of a bfloat16 that is smaller by the difference of the biases.
        wide = numbers.astype(jnp.int16)
        bits = ((wide << 4) & jnp.int16(0x07F0)) | (wide & jnp.int16(-0x8000))
        small: jax.Array = lax.bitcast_convert_type(bits, jnp.bfloat16)
        return small * jnp.bfloat16(2.0**120)


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
    is_fp8: bool,
) -> None:
    rows, outputs = cut.rows, OUTPUTS * cut.warpgroups
    separate, t, o = y_dto_ref.shape
    row_tiles = t // rows if inputs.num_tiles is None else inputs.num_tiles[0]
    depths = inputs.x_ti.shape[1] // cut.depth // parts
    steps = pl.cdiv(row_tiles * (o // outputs * separate) - lax.axis_index("c"), thread_blocks)
    wg = lax.axis_index("wg")
    # Sums in 128 registers leave a thread too few to convert numbers with.
    converts = inputs.values[0].dtype != inputs.x_ti.dtype
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
            first = reference.ACTIVATIONS[activation](sums[0]) if activation else sums[0]
            return first * sums[1] if len(sums) == 2 else first

        def tile(step: jax.Array, filled: jax.Array) -> jax.Array:
            part, row_tile, output = work(step)
            sums = ring.sums(own, depths, filled, is_fp8)
            filled += depths
            for _ in range(1, parts // separate):
                sums = [a + b for a, b in zip(sums, ring.sums(own, depths, filled, is_fp8), strict=True)]
                filled += depths
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
                inputs, expert=expert(row_tile), row=pl.multiple_of(row_tile * rows, rows), output=output,
                start=part * depths * cut.depth, depths=several, filled=filled,
            )  # fmt: skip

        ring.drain(lax.fori_loop(0, steps, tile, jnp.int32(0)))


def launch(
    inputs: Inputs, cut: tuning.MosaicProduct, dtype: Any, *, parts: int = 1, separate: bool = False,
    activation: str | None = None,
) -> jax.Array:  # fmt: skip
    """Compute the product of rows with a weight, or the gated product with two.

    Args:
        parts: of the inputs. Their sums are added in order.
        separate: return the sums of the parts instead.

    Returns:
        [1, T, O] of a dtype, or [parts, T, O] float32 if they are separate.
    """
    (t, i), (_, o, _) = inputs.x_ti.shape, inputs.values[0].shape
    outputs = OUTPUTS * cut.warpgroups
    assert t % cut.rows == 0 and o % outputs == 0 and i % (parts * cut.depth) == 0, (inputs.x_ti.shape, o, cut)
    out = jax.ShapeDtypeStruct((parts if separate else 1, t, o), jnp.float32 if separate else dtype)
    thread_blocks = min(t // cut.rows * (o // outputs) * out.shape[0], cut.blocks_per_sm * num_sms())
    check_grid("product", (thread_blocks,))
    is_fp8 = inputs.values[0].dtype == FP8
    if is_fp8:
        bits = tuple(lax.bitcast_convert_type(array, jnp.int8) for array in inputs.values)
        inputs = inputs._replace(values=bits)
    leaves, structure = jax.tree.flatten(inputs)
    settings = dict(is_fp8=is_fp8, cut=cut, parts=parts, thread_blocks=thread_blocks, activation=activation)

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
            ring=Ring.scratch(inputs, cut),
        ),
        compiler_params=compiler_params(unsafe_no_auto_barriers=True),
        kernel_name="product",
    )(*leaves)
    return y_dto
