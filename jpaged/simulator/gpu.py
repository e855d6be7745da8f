"""GPUs and CPUs by their data sheets."""

from typing import NamedTuple


class Gpu(NamedTuple):
    """Device of a simulation.

    Attributes:
        name: name for people.
        memory_bytes: memory as the driver reports it.
        bandwidth: bytes per second between memory and cores.
        flops: dense 16-bit operations of the tensor cores per second.
        link_bandwidth: bytes per second to the other GPUs of a host, in one direction; 0: it serves a model alone.
        product_kernels: whether products of one device are kernels. They read the weights of experts with rows only,
            and weights with groups as they are stored.
        host_bandwidth: bytes per second between its memory and the host's, in one direction.
    """

    name: str
    memory_bytes: float
    bandwidth: float
    flops: float
    link_bandwidth: float
    product_kernels: bool = False
    host_bandwidth: float = 64e9

    def multiplies(self, num_gpus: int) -> bool:
        """Return whether kernels multiply on this number of devices that share a model."""
        return self.product_kernels and num_gpus == 1


# NVIDIA's data sheets of the SXM modules: A100 (2021), H100 (2022), H200 (2024), and HGX B200 (2025).
# RTX cards: the appendices of NVIDIA's white papers "Ada GPU Architecture" (4090), "Ada GPU Architecture, professional"
# (6000 Ada), "RTX Blackwell GPU Architecture" (5090), and "RTX PRO Blackwell" (PRO 6000, Workstation Edition). Their
# operations have sums in float32, at half the rate on GeForce cards. Their links are 16 lanes of PCIe 4 or 5.
# The memory of B200 and RTX cards is the total that nvidia-smi shows. By the same sources, the links to the host are 16
# lanes of PCIe 4 for A100 and Ada (32 GB/s in each direction), and of PCIe 5 for the others (64 GB/s).
GPUS = {
    "a100-40gb": Gpu("A100 40GB", 40 * 2**30, 1.555e12, 312e12, 300e9, host_bandwidth=32e9),
    "a100-80gb": Gpu("A100 80GB", 80 * 2**30, 2.039e12, 312e12, 300e9, host_bandwidth=32e9),
    "h100": Gpu("H100 80GB", 79.6 * 2**30, 3.35e12, 989e12, 450e9, product_kernels=True),
    "h200": Gpu("H200 141GB", 140.4 * 2**30, 4.8e12, 989e12, 450e9, product_kernels=True),
    "b200": Gpu("B200 180GB", 183_359 * 2**20, 8e12, 2250e12, 900e9),
    "rtx-4090": Gpu("RTX 4090 24GB", 24_564 * 2**20, 1.008e12, 165.2e12, 32e9, host_bandwidth=32e9),
    "rtx-5090": Gpu("RTX 5090 32GB", 32_607 * 2**20, 1.792e12, 209.5e12, 64e9),
    "rtx-6000-ada": Gpu("RTX 6000 Ada 48GB", 49_140 * 2**20, 0.96e12, 364.2e12, 32e9, host_bandwidth=32e9),
    "rtx-pro-6000": Gpu("RTX PRO 6000 96GB", 97_887 * 2**20, 1.792e12, 503.8e12, 64e9),
}

# Data sheets of AMD and Intel: channels of DDR5 memory at their rate, and float32 operations of all cores at the base
# clock (32 per cycle of Zen 4, 64 of Sapphire Rapids). The memory is that of a usual machine. A move to the host is a
# copy in it, which reads and writes each byte.
CPUS = {
    "ryzen-9-7950x": Gpu("Ryzen 9 7950X", 64 * 2**30, 83.2e9, 2.3e12, 0, True, host_bandwidth=41.6e9),
    "epyc-9654": Gpu("EPYC 9654", 384 * 2**30, 460.8e9, 7.37e12, 0, True, host_bandwidth=230.4e9),
    "xeon-8480+": Gpu("Xeon Platinum 8480+", 256 * 2**30, 307.2e9, 7.17e12, 0, True, host_bandwidth=153.6e9),
}
