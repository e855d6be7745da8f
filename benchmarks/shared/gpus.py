"""NVIDIA GPUs as XLA's compiler wants them described, from NVIDIA's data sheets and architecture white papers."""

from dataclasses import dataclass

KIB, GB = 2**10, 10**9
ACCELERATED = " feature_extension: ACCELERATED_FEATURES"  # sm_90a and sm_100a


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU.

    Attributes:
        kind: its name as the driver gives it.
        major, minor: its compute capability.
        shared_memory, shared_memory_per_sm: bytes that one thread block can have, and those of a multiprocessor.
        memory_bandwidth: bytes per second.
    """

    kind: str
    major: int
    minor: int
    sms: int
    shared_memory: int
    shared_memory_per_sm: int
    fpus_per_sm: int
    memory: int
    memory_bandwidth: int
    l2_cache: int
    clock_rate_ghz: float

    @property
    def capability(self) -> float:
        """The compute capability as jax gives it, such as 9.0."""
        return float(f"{self.major}.{self.minor}")

    @property
    def target(self) -> str:
        """The name of the architecture that XLA compiles for, such as sm_90a."""
        return f"sm_{self.major}{self.minor}" + "a" * self._is_accelerated

    @property
    def _is_accelerated(self) -> bool:
        return self.major in (9, 10)

    @property
    def description(self) -> str:
        """The description in protocol buffer text."""
        return f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: {48 * KIB}
  shared_memory_per_core: {self.shared_memory_per_sm}
  shared_memory_per_block_optin: {self.shared_memory}
  threads_per_core_limit: {1536 if self.major == 12 or self.minor == 9 else 2048}
  core_count: {self.sms}
  fpus_per_core: {self.fpus_per_sm}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  memory_bandwidth: {self.memory_bandwidth}
  l2_cache_size: {self.l2_cache}
  clock_rate_ghz: {self.clock_rate_ghz}
  device_memory_size: {self.memory}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  cuda_compute_capability {{ major: {self.major} minor: {self.minor}{ACCELERATED * self._is_accelerated} }}
  device_vendor: "NVIDIA Corporation"
  name: "{self.kind}"
  driver_version: "13.0.0"
  runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0"
  dnn_version: "9.12.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 12 patch: 0 }}
device_description_str: "{self.kind}"
"""


A100 = Gpu("NVIDIA A100-SXM4-80GB", 8, 0, 108, 163 * KIB, 164 * KIB, 64, 80 * 2**30, 2_039 * GB, 40 * 2**20, 1.41)
L4 = Gpu("NVIDIA L4", 8, 9, 58, 99 * KIB, 100 * KIB, 128, 24 * 2**30, 300 * GB, 48 * 2**20, 2.04)
RTX_4090 = Gpu("NVIDIA GeForce RTX 4090", 8, 9, 128, 99 * KIB, 100 * KIB, 128, 24 * 2**30, 1_008 * GB, 72 * 2**20, 2.52)
H100 = Gpu("NVIDIA H100 80GB HBM3", 9, 0, 132, 227 * KIB, 228 * KIB, 128, 80 * 2**30, 3_350 * GB, 50 * 2**20, 1.98)
H200 = Gpu("NVIDIA H200", 9, 0, 132, 227 * KIB, 228 * KIB, 128, 150 * GB, 4_800 * GB, 50 * 2**20, 1.98)
B200 = Gpu("NVIDIA B200", 10, 0, 148, 227 * KIB, 228 * KIB, 128, 192 * GB, 8_000 * GB, 126 * 2**20, 1.965)
RTX_PRO_6000 = Gpu(
    "NVIDIA RTX PRO 6000 Blackwell Server Edition", 12, 0, 188, 99 * KIB, 100 * KIB, 128, 96 * 2**30, 1_597 * GB,
    128 * 2**20, 2.43,
)  # fmt: skip
RTX_5090 = Gpu(
    "NVIDIA GeForce RTX 5090", 12, 0, 170, 99 * KIB, 100 * KIB, 128, 32 * 2**30, 1_792 * GB, 96 * 2**20, 2.41
)
GB10 = Gpu("NVIDIA GB10", 12, 1, 48, 99 * KIB, 100 * KIB, 128, 128 * GB, 273 * GB, 24 * 2**20, 2.5)

GPUS = {
    "a100": A100, "l4": L4, "rtx-4090": RTX_4090, "h100": H100, "h200": H200, "b200": B200,
    "rtx-pro-6000": RTX_PRO_6000, "rtx-5090": RTX_5090, "gb10": GB10,
}  # fmt: skip
