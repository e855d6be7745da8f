"""Products of the Mosaic GPU kernel compiled for an H200 without one: figures, rules of the hardware, machine code."""

import functools
import importlib
import types
from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from benchmarks.shared import deviceless
from benchmarks.shared.gpus import H200
from pallas_kernels import mosaic
from pallas_kernels.mosaic import matmul
from pallas_kernels.tuning import MosaicProduct
from tests.kernels import gpu_compiler, mosaic_program, sass
from tests.kernels.implementations import ops_of
from tests.kernels.products import FORMS, described_weight

pytestmark = pytest.mark.skipif(deviceless.why_not() is not None, reason=str(deviceless.why_not()))
HAS_SASS = deviceless.find_tool("nvdisasm") is not None
needs_sass = pytest.mark.skipif(not HAS_SASS, reason="nvdisasm was not found (pip install nvidia-cuda-nvdisasm)")

product_module = importlib.import_module("pallas_kernels.mosaic.product")  # the package has a function of this name
REGISTERS_PER_SM, REGISTER_UNIT = 65_536, 8
RESERVED = 1024  # bytes of shared memory that CUDA keeps for each thread block
S = jax.ShapeDtypeStruct


class Product(NamedTuple):
    """A product in bfloat16; by default with the query, key and value weights of Llama-3.1-8B."""

    form: str
    rows: int
    outputs: int = 6144
    inputs: int = 4096
    is_gated: bool = False
    experts: int = 0

    @property
    def arguments(self) -> tuple:
        """Arguments of `multiply`, without arrays."""
        shape = (*[self.experts][: self.experts], self.outputs, self.inputs)
        weight = described_weight(FORMS[self.form], *shape)
        sizes = S((self.experts,), jnp.int32) if self.experts else None
        return S((self.rows, self.inputs), jnp.bfloat16), weight, weight if self.is_gated else None, sizes


DENSE, INT8, SEVERAL_PARTS = Product("bfloat16", 64), Product("int8", 64), Product("bfloat16", 2048, 4096, 14336)
INT4, GROUPED = "int4 in groups of 32", ("int4 without minima", "int4 in groups of 128", "int8 in groups of 32")
GATED_INT4 = Product(INT4, 64, 14336, is_gated=True)
ROWS = (1, 32, 64, 128, 2048)
ALL = [
    *(Product(form, rows) for form in ("bfloat16", "int8", "fp8") for rows in ROWS),
    *(Product(form, rows, 14336, is_gated=True) for form in ("bfloat16", "int8", "fp8") for rows in ROWS),
    *(Product(form, 128 * rows, 768, 2048, True, 128) for form in ("bfloat16", "int8", INT4) for rows in ROWS),
    *(Product(form, 128 * rows, 2048, 768, False, 128) for form in ("bfloat16", "int8", INT4) for rows in ROWS),
    *(Product(form, rows, is_gated=is_gated) for form in GROUPED for rows in ROWS for is_gated in (False, True)),
    *(Product(INT4, rows, **shape) for rows in ROWS for shape in (dict(), dict(outputs=14336, is_gated=True))),
    *(Product(form, rows, 4096, 14336) for form in ("int8", INT4) for rows in ROWS),
    *(Product("bfloat16", rows, 4096, 14336) for rows in ROWS),
    *(Product("bfloat16", rows, 576, 1536) for rows in ROWS),
    *(Product("bfloat16", rows, 64 * 99) for rows in ROWS),
    *(Product(form, rows, 64 * 25, is_gated=True) for form in ("bfloat16", "int8") for rows in ROWS),
    *(Product("mxfp4", 4 * rows, 2880, 2880, is_gated, 32) for rows in ROWS for is_gated in (False, True)),
]
GPT_OSS = Product("mxfp4", 256, 2880, 2880, is_gated=True, experts=32)


def multiply(x_ti, weight, up, sizes_e):
    options = {} if up is None else dict(up=up, activation="silu")
    return ops_of(mosaic).product(x_ti, weight, **options | ({} if sizes_e is None else dict(sizes_e=sizes_e)))


@functools.cache
def compiled(case: Product) -> tuple[gpu_compiler.Compiled, MosaicProduct]:
    """Compile a product; return its cut, too."""
    cuts, launch = [], product_module.launch

    def noted(inputs, dtype, *, cut, **options):
        cuts.append(cut)
        return launch(inputs, dtype, cut=cut, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(product_module, "launch", noted)
        result = gpu_compiler.compile_for_h200(lambda *args: multiply(*args), *case.arguments, sass=HAS_SASS)
    [cut] = cuts
    return result, cut


def main_loop(case: Product) -> sass.Loop:
    """Return the loop over tiles of inputs."""
    listing = compiled(case)[0].kernels["product"].sass
    return next(body for lines in sass.loops(listing) if sass.products(body := listing[lines.start : lines.stop]))


def faults(case: Product) -> list[str]:
    [dump] = gpu_compiler.lowered_for_h200(lambda *args: multiply(*args), *case.arguments)
    return mosaic_program.parse(*dump).faults(shared_memory=H200.shared_memory)


cases = pytest.mark.parametrize(
    "case",
    [
        case if case in (DENSE, INT8, SEVERAL_PARTS, GPT_OSS) else pytest.param(case, marks=pytest.mark.deep)
        for case in ALL
    ],
    ids=lambda case: "-".join(map(str, case)),
)


@cases
def test_it_fits_and_keeps_the_rules(case):
    result, cut = compiled(case)
    assert set(result.kernels) == {"product"}
    seen = result.kernels["product"]
    assert seen.spill_bytes == 0 and not seen.wgmma_serialised and seen.wgmma and seen.tma, seen
    assert seen.shared_memory <= H200.shared_memory
    assert cut.blocks_per_sm * (seen.shared_memory + RESERVED) <= H200.shared_memory_per_sm
    registers = -(-seen.registers // REGISTER_UNIT) * REGISTER_UNIT
    assert cut.blocks_per_sm * registers * seen.threads <= REGISTERS_PER_SM, seen
    assert not faults(case)


def test_one_launch():
    """Nothing is padded, cut or added beside it."""
    assert compiled(DENSE)[0].launches.total() == 1


@needs_sass
def test_products_follow_each_other():
    """No iteration waits for its own product."""
    assert "WARPGROUP.DEPBAR.LE gsb0, 0x1" in main_loop(DENSE)
    assert not sass.count(main_loop(DENSE), "WARPGROUP.DEPBAR.LE gsb0, 0x0")


@needs_sass
@pytest.mark.deep
def test_gated_products_follow_each_other():
    gated = main_loop(Product("bfloat16", 2048, 14336, is_gated=True))
    assert sass.products(gated) == 2 and not sass.count(gated, "WARPGROUP.DEPBAR.LE gsb0, 0x0")


@needs_sass
@pytest.mark.parametrize(
    ("case", "instruction"),
    [(INT8, "HADD2.BF16_V2"), pytest.param(Product("fp8", 64), "HMUL2.BF16_V2", marks=pytest.mark.deep)],
    ids=["int8", "fp8"],
)
def test_numbers_become_bfloat16_in_pairs(case, instruction):
    """By bits and one instruction for each pair, which knows subnormal numbers; the slow I2F is absent."""
    loop = main_loop(case)
    pairs = matmul.OUTPUTS * compiled(case)[1].depth // 128 // 2  # of a thread
    assert sass.count(loop, instruction) == pairs
    assert not any(sass.count(loop, other) for other in ("I2F", "F2F", "FTZ", "STL", "LDL"))


@needs_sass
@pytest.mark.parametrize(
    ("form", "most"),
    [
        (INT4, 290),
        *(pytest.param(*case, marks=pytest.mark.deep) for case in zip(GROUPED, (265, 270, 370), strict=True)),
    ],
)
def test_instructions_of_weights_with_groups(form, most):
    """For 64 outputs and 128 inputs: 64 numbers of a thread, of which four instructions convert and scale two."""
    case = Product(form, 64)
    loop, steps = main_loop(case), compiled(case)[1].depth / 128
    assert len(loop) <= most * steps
    scaled = sum(sass.count(loop, f"{name}.BF16_V2") for name in ("HMUL2", "HFMA2", "HADD2"))
    assert scaled == 64 * steps
    assert not any(sass.count(loop, other) for other in ("I2F", "FTZ", "STL", "LDL"))
    if FORMS[form].is_packed:
        assert sass.count(loop, "SHFL") == 8 * steps and sass.count(loop, "PRMT") <= 20 * steps


def changed_in_sums(patch: pytest.MonkeyPatch, **functions) -> None:
    """Change functions of `plgpu` where a ring is read."""
    sums = matmul.Ring.sums

    def wrong(*args):
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(matmul, "plgpu", types.SimpleNamespace(**vars(plgpu) | functions))
            return sums(*args)

    patch.setattr(matmul.Ring, "sums", wrong)


def nothing(*args, **options):
    """Do nothing."""


class TestPlantedFaults:
    """Each is only found by these rules: the interpreter knows no proxies and no products in flight."""

    @pytest.mark.parametrize(
        ("case", "functions", "fault"),
        [
            (INT8, dict(commit_smem=nothing), "handed back while other warps may read it"),
            (INT8, dict(wgmma_wait=nothing), "handed back while a wgmma reads it"),
            (DENSE, dict(wgmma_wait=lambda n: plgpu.wgmma_wait(n + 1)), "handed back while a wgmma reads it"),
            (DENSE, dict(barrier_wait=nothing), "before a wait for its copy"),
            (INT8, dict(barrier_wait=nothing), "before a wait for its copy"),
        ],
        ids=["no meeting of warps", "no wait, int8", "a wait for too few", "no wait for rows", "no wait for numbers"],
    )
    def test_of_a_ring(self, case, functions, fault, monkeypatch):
        changed_in_sums(monkeypatch, **functions)
        assert any(fault in found for found in faults(case))

    def test_a_result_is_copied_without_a_fence(self, monkeypatch):
        monkeypatch.setattr(matmul, "plgpu", types.SimpleNamespace(**vars(plgpu) | dict(commit_smem=nothing)))
        assert any("store reads the buffer" in fault and "without a proxy fence" in fault for fault in faults(DENSE))

    @needs_sass
    @pytest.mark.deep
    def test_a_wait_for_all_products(self, monkeypatch):
        changed_in_sums(monkeypatch, wgmma_wait=lambda n: plgpu.wgmma_wait(0))
        compiled.cache_clear()
        try:
            assert sass.count(main_loop(DENSE), "WARPGROUP.DEPBAR.LE gsb0, 0x0")
        finally:
            compiled.cache_clear()
