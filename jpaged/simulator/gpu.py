"""GPUs by their data sheets."""

from typing import NamedTuple


class Gpu(NamedTuple):
    """GPU of a simulation.

    Attributes:
        name: name for people.
        memory_bytes: memory as the driver reports it.
        bandwidth: bytes per second between memory and cores.
        flops: dense 16-bit operations of the tensor cores per second.
        link_bandwidth: bytes per second to the other GPUs of a host, in one direction.
    """

    name: str
    memory_bytes: float
    bandwidth: float
    flops: float
    link_bandwidth: float


# NVIDIA's data sheets of the SXM modules: A100 (2021), H100 (2022) and H200 (2024).
GPUS = {
    "a100-40gb": Gpu("A100 40GB", 40 * 2**30, 1.555e12, 312e12, 300e9),
    "a100-80gb": Gpu("A100 80GB", 80 * 2**30, 2.039e12, 312e12, 300e9),
    "h100": Gpu("H100 80GB", 79.6 * 2**30, 3.35e12, 989e12, 450e9),
    "h200": Gpu("H200 141GB", 140.4 * 2**30, 4.8e12, 989e12, 450e9),
}
