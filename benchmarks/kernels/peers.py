"""Attention of other libraries, each in its best layout. Moving data into that layout is not timed."""

import importlib.util
import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.kernels.implementations import HostTimed, Unsuitable, dense_kv
from benchmarks.kernels.workloads import Workload
from benchmarks.shared.device import Device
from benchmarks.shared.timing import TorchTimed

MAX_DENSE_BYTES = 8 * 2**30  # of copies of the pool in another layout, on top of the pool
WORKSPACE_BYTES = 256 * 2**20


class Peer:
    """One way to compute attention.

    Attributes:
        name: as results name it.
        packages: that must be importable.
        paged: reads the pool through tables; otherwise contiguous keys and values.
    """

    name = ""
    packages: tuple[str, ...] = ()
    paged = False

    def available(self, device: Device) -> str | None:
        """Why it can't run on this machine; None if it can."""
        if not device.is_gpu:
            return "needs an NVIDIA GPU"
        missing = [package for package in self.packages if importlib.util.find_spec(package) is None]
        if missing:
            return f"{', '.join(missing)} can't be imported"
        if "torch" in self.packages:
            import torch

            if not torch.cuda.is_available():
                return f"torch {torch.__version__} sees no GPU"
        return None

    def prepare(self, workload: Workload) -> Any:
        """Something to time on a workload. Raises Unsuitable."""
        raise NotImplementedError


def _only_equal(workload: Workload) -> None:
    if len(set(workload.lens)) > 1 or len(set(workload.q_lens or [1])) > 1:
        raise Unsuitable("takes equal lengths only")
    if workload.q_lens is not None and workload.q_lens != workload.lens:
        raise Unsuitable("takes whole prompts only")


def _dense_sets(workload: Workload) -> int:
    """How many sets are copied into another layout; one is read many times if more would not fit."""
    one = len(workload.lens) * max(workload.lens) * workload.shape.token_bytes
    if one > MAX_DENSE_BYTES:
        raise Unsuitable(f"a copy of the keys and values takes {one / 2**30:.0f} GiB")
    return min(workload.sets, max(1, MAX_DENSE_BYTES // one))


class JaxCudnn(Peer):
    """cuDNN's attention as jax calls it, on contiguous [S, L, K, H]."""

    name = "jax cudnn (contiguous)"

    def prepare(self, workload: Workload) -> HostTimed:
        if workload.q_lens is not None:
            _only_equal(workload)
        s, length, shape = len(workload.lens), max(workload.lens), workload.shape
        causal = workload.q_lens is not None
        lens = None if causal or len(set(workload.lens)) == 1 else workload.context_lens

        def call(q, lens, own):
            k, v = own
            o = jax.nn.dot_product_attention(
                q.reshape(s, -1, shape.num_heads, shape.head_dim), k, v, scale=shape.scale, is_causal=causal,
                key_value_seq_lengths=lens, implementation="cudnn",
            )  # fmt: skip
            return o.reshape(q.shape)

        to_slkh = jax.jit(lambda x: x[:, :, :length].swapaxes(1, 2))
        owns = [tuple(map(to_slkh, dense_kv(workload, i))) for i in range(_dense_sets(workload))]
        timed = HostTimed(call, workload.q, lens, workload.cycled(owns))
        timed.sets = len(owns)
        return timed


class JaxPaged(Peer):
    """jax's own paged decode attention (Pallas-Triton), on pages [K, P, B, H]."""

    name = "jax paged_attention"
    paged = True

    def prepare(self, workload: Workload) -> HostTimed:
        if workload.q_lens is not None:
            raise Unsuitable("is for decode only")
        blocks = workload.sets * workload.blocks_per_set
        copied = blocks * workload.shape.block_size * workload.shape.token_bytes
        if copied > MAX_DENSE_BYTES:
            raise Unsuitable(f"a copy of the pool takes {copied / 2**30:.0f} GiB")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention
        splits = 16  # its default; the tables are padded to a multiple of it
        pages = max(1, 128 // workload.shape.block_size)  # per step: 128 tokens
        width = -(-workload.table_sw.shape[1] // (splits * pages)) * splits * pages
        pad = lambda table: jnp.pad(table, ((0, 0), (0, width - table.shape[1])))

        def call(q, shared, table):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)
                return paged_attention(q, *shared[:2], table, shared[2], k_splits=splits, pages_per_compute_block=pages)

        pools = tuple(jax.jit(lambda x: x[:blocks].swapaxes(0, 1))(x) for x in (workload.k_pool, workload.v_pool))
        q = (workload.q.astype(jnp.float32) * workload.shape.scale).astype(workload.q.dtype)  # it has no scale
        return HostTimed(call, q, (*pools, workload.context_lens), workload.cycled(list(map(pad, workload.set_tables))))


class TorchSdpa(Peer):
    """torch's scaled_dot_product_attention on contiguous [S, K, L, H], by one of its backends."""

    packages = ("torch",)

    def __init__(self, backend: str):
        self.name = f"torch {backend} (contiguous)"
        self._backend = {"cudnn": "CUDNN_ATTENTION", "flash": "FLASH_ATTENTION"}[backend]

    def prepare(self, workload: Workload) -> TorchTimed:
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel

        _only_equal(workload)
        s, length, shape = len(workload.lens), workload.lens[0], workload.shape
        q = _torch(workload.q).view(s, -1, shape.num_heads, shape.head_dim).transpose(1, 2).contiguous()
        cut = lambda x: _torch(x)[:, :, :length].contiguous()
        sets = [tuple(map(cut, dense_kv(workload, i))) for i in range(_dense_sets(workload))]

        def closure(k, v):
            def run():
                with sdpa_kernel(getattr(SDPBackend, self._backend)):
                    return torch.nn.functional.scaled_dot_product_attention(
                        q, k, v, is_causal=workload.q_lens is not None, scale=shape.scale, enable_gqa=True
                    )

            return run

        finish = lambda o: o.transpose(1, 2).reshape(-1, shape.num_heads, shape.head_dim)
        timed = TorchTimed([closure(*each) for each in workload.cycled(sets)], finish)
        timed.sets = len(sets)
        return timed


class FlashInfer(Peer):
    """FlashInfer's batch wrappers on our own pool, whose layout is its HND. `plan` is not part of the time."""

    packages = ("torch", "flashinfer")
    paged = True

    def __init__(self, name: str, kind: str, **options: Any):
        self.name, self.kind, self.options = name, kind, options

    def prepare(self, workload: Workload) -> TorchTimed:
        if (workload.q_lens is None) != (self.kind == "decode"):
            raise Unsuitable(f"is for {self.kind} only")
        prepare_flashinfer()
        import flashinfer
        import torch

        shape, device = workload.shape, torch.device("cuda")
        workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        int32 = lambda values: torch.tensor(values, dtype=torch.int32, device=device)
        blocks = [len(table) for table in workload.tables]
        pages = (
            int32(np.cumsum([0, *blocks]).tolist()), int32([block for table in workload.tables for block in table]),
            int32([(n - 1) % shape.block_size + 1 for n in workload.lens]),
        )  # fmt: skip
        dtype = getattr(torch, shape.dtype)
        q = _torch(workload.q)
        if self.kind == "decode":
            wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", **self.options)
            wrapper.plan(
                *pages, shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.block_size,
                q_data_type=dtype, kv_data_type=dtype, sm_scale=shape.scale,
            )  # fmt: skip
        else:
            wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND", **self.options)
            wrapper.plan(
                int32(workload.cu_q_lens.tolist()), *pages, shape.num_heads, shape.num_kv_heads, shape.head_dim,
                shape.block_size, causal=True, q_data_type=dtype, kv_data_type=dtype, sm_scale=shape.scale,
            )  # fmt: skip
        k_pool, v_pool = _torch(workload.k_pool), _torch(workload.v_pool)

        def closure(index: int) -> Callable[[], Any]:
            blocks = slice(index * workload.blocks_per_set, (index + 1) * workload.blocks_per_set)
            pools = k_pool[blocks], v_pool[blocks]
            return lambda: wrapper.run(q, pools)

        return TorchTimed(workload.cycled([closure(i) for i in range(workload.sets)]))


ALL: tuple[Peer, ...] = (
    FlashInfer("flashinfer", "decode"),
    FlashInfer("flashinfer tensor cores", "decode", use_tensor_cores=True),
    FlashInfer("flashinfer fa2", "prefill", backend="fa2"),
    FlashInfer("flashinfer fa3", "prefill", backend="fa3"),
    TorchSdpa("cudnn"),
    TorchSdpa("flash"),
    JaxCudnn(),
    JaxPaged(),
)


def prepare_flashinfer() -> None:
    """Let FlashInfer compile its modules with the tools of the machine: it needs the toolkit's real folder, the
    headers of the CUDA wheels and a libcuda to link with."""
    nvcc = shutil.which("nvcc")
    homes = [Path(nvcc).resolve().parents[1]] if nvcc else []
    homes += sorted(Path("/usr/local").glob("cuda*"), reverse=True)
    home = next((path for path in homes if (path / "include" / "cuda.h").is_file()), None)
    if home:
        os.environ.setdefault("CUDA_HOME", str(home))
    import torch

    major, minor = torch.cuda.get_device_capability()
    os.environ.setdefault("FLASHINFER_CUDA_ARCH_LIST", f"{major}.{minor}" + "a" * (major >= 9))
    nvidia = importlib.util.find_spec("nvidia")
    for folder in nvidia.submodule_search_locations or () if nvidia else ():
        includes = [str(path.parent) for path in Path(folder).glob("**/include/curand_kernel.h")]
        _extend("CPATH", includes)
    _extend("LIBRARY_PATH", [str(_libcuda_folder())])


def _libcuda_folder() -> Path:
    """A folder with a `libcuda.so` to link with: a link to the driver's, which has a version in its name."""
    folder = Path(os.environ.get("FLASHINFER_WORKSPACE_BASE", ".")) / "lib"
    folder.mkdir(parents=True, exist_ok=True)
    link = folder / "libcuda.so"
    places = ("/usr/local/nvidia/lib64", "/usr/lib/x86_64-linux-gnu", "/usr/lib64", "/usr/local/cuda/compat")
    for place in places:
        driver = Path(place) / "libcuda.so.1"
        if driver.exists() and not link.exists():
            link.symlink_to(driver)
    return folder


def _extend(variable: str, folders: list[str]) -> None:
    held = [folder for folder in os.environ.get(variable, "").split(os.pathsep) if folder]
    os.environ[variable] = os.pathsep.join(held + [folder for folder in folders if folder not in held])


def _torch(x: jax.Array) -> Any:
    """The same memory as a torch tensor."""
    import torch

    return torch.from_dlpack(jax.block_until_ready(x))
