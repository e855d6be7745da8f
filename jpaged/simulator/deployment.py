"""Model on GPUs: its memory, and engines on a virtual clock."""

import math
from dataclasses import dataclass, field
from functools import partial

from jpaged.config import BLOCK_SIZE, EngineConfig, Limits
from jpaged.config import GPU as GPU_DEFAULTS
from jpaged.core.block_pool import BlockPool
from jpaged.core.groups import Groups, group_layers, most_held
from jpaged.core.pages import PAGES_PER_SEQUENCE, divide_memory
from jpaged.core.scheduler import HEADROOM, Scheduler
from jpaged.simulator.cost import BANDWIDTH_SHARE, CostTable, Roofline, StepCost, StepLoad
from jpaged.simulator.engine import VOCAB_SIZE, VirtualEngine
from jpaged.simulator.gpu import Gpu
from jpaged.simulator.shape import ModelShape

TEMPORARIES_BYTES = 2 * 2**30  # of each GPU: the largest step's, and CUDA's own
MAX_USERS = 4096


@dataclass(frozen=True)
class Deployment:
    """Model on GPUs, with the settings of its engine.

    Attributes:
        max_num_seqs: None: one for each user, at most `MAX_USERS` and `max_num_batched_tokens`.
        costs: measured costs of a step; None: the roofline of the GPUs.
        weight_bits: bits of a weight of the linear layers and experts, with its share of scales.
        embedding_bits: the same of the embedding and the output matrix.
        host_bytes: memory of the host for evicted blocks of the prefix cache.
    """

    gpu: Gpu
    shape: ModelShape
    num_gpus: int = 1
    kv_dtype_bytes: int = 2
    block_size: int = BLOCK_SIZE
    max_num_seqs: int | None = None
    max_num_batched_tokens: int = GPU_DEFAULTS.max_num_batched_tokens
    gpu_memory_utilization: float = EngineConfig.gpu_memory_utilization
    enable_prefix_caching: bool = EngineConfig.enable_prefix_caching
    costs: CostTable | None = None
    weight_bits: float = 16
    embedding_bits: float = 16
    host_bytes: float = 0
    max_model_len: int = field(kw_only=True)

    def __post_init__(self) -> None:
        shape, gpus = self.shape, self.num_gpus
        EngineConfig(
            tensor_parallel_size=gpus, block_size=self.block_size, max_model_len=self.max_model_len,
            max_num_seqs=self.max_num_seqs, max_num_batched_tokens=self.max_num_batched_tokens,
            gpu_memory_utilization=self.gpu_memory_utilization,
        )  # fmt: skip
        if gpus > 1 and not self.gpu.link_bandwidth:
            raise ValueError(f"tensor_parallel_size: must be 1 on {self.gpu.name}, not {gpus}")
        larger, smaller = max(gpus, shape.num_kv_heads), min(gpus, shape.num_kv_heads)
        if (
            any(size % gpus for size in (shape.num_heads, shape.intermediate_size, shape.expert_size))
            or larger % smaller
        ):
            raise ValueError(
                f"tensor_parallel_size: {gpus} GPUs can't share the {shape.num_heads} heads and {shape.num_kv_heads} "
                f"KV heads of {shape.name}"
            )
        if self.host_bytes and shape.state_bytes:
            raise ValueError(f"host_bytes: must be 0 for {shape.name}: moves of states are not simulated")
        if self.max_model_len > shape.context:
            raise ValueError(f"max_model_len: {self.max_model_len} exceeds the {shape.context} tokens of {shape.name}")
        if self.num_blocks < self._most_blocks(self.max_model_len):
            raise ValueError(
                f"gpu: no room on {gpus} x {self.gpu.name} for {shape.name} ({self.param_bytes / 2**30:.1f} GiB) "
                f"and the KV of one sequence of {self.max_model_len} tokens "
                f"({self.kv_bytes(self.max_model_len) / 2**30:.1f} GiB): use more GPUs "
                "(--tensor-parallel-size) or a smaller --max-model-len"
            )

    @property
    def param_bytes(self) -> float:
        """Bytes of the parameters on all GPUs."""
        return self.shape.param_bytes(self.weight_bits, self.embedding_bits)

    @property
    def pool_tokens(self) -> int:
        """Tokens of KV of all layers that fit into the memory beside the parameters and the states."""
        states = self.num_pages * self.shape.state_bytes
        return max(0, math.floor((self._pool_bytes - states) / self.shape.kv_bytes(self.kv_dtype_bytes, self.num_gpus)))

    @property
    def groups(self) -> Groups:
        """Groups of the layers."""
        return group_layers(self.shape.windows or (None,) * self.shape.num_attention_layers, self.max_model_len)

    @property
    def num_blocks(self) -> int:
        """Number of KV blocks, each of one group of layers."""
        return self._blocks_and_pages[0]

    @property
    def num_pages(self) -> int:
        """Number of pages for the states of recurrent layers."""
        return self._blocks_and_pages[1]

    @property
    def _blocks_and_pages(self) -> tuple[int, int]:
        num_blocks = max(0, math.floor(self._pool_bytes / self._block_bytes))
        wanted = PAGES_PER_SEQUENCE * (self.max_num_seqs or GPU_DEFAULTS.max_num_seqs)
        return divide_memory(num_blocks, self._block_bytes, self.shape.state_bytes, wanted)

    def kv_bytes(self, num_tokens: int) -> int:
        """Return the maximum bytes that a sequence of some tokens holds at once, on all GPUs, its state included."""
        return self._most_blocks(num_tokens) * self._block_bytes + self.shape.state_bytes

    def tokens_held(self, num_tokens: float) -> float:
        """Return the tokens of all layers that take as much memory as a sequence of some tokens once it is computed."""
        return num_tokens * self.shape.share_seen(num_tokens) + self.block_size

    def _most_blocks(self, num_tokens: int) -> int:
        count, reach = -(-num_tokens // self.block_size), 2 * self.max_num_batched_tokens
        held = most_held(self.groups.windows, self.block_size, reach)
        return sum(min(count, most or count) for most in held)

    @property
    def _block_bytes(self) -> int:
        shape = self.shape
        layer = shape.kv_bytes(self.kv_dtype_bytes, self.num_gpus) // shape.num_attention_layers
        return layer * self.groups.size * self.block_size

    @property
    def _pool_bytes(self) -> float:
        temporaries = TEMPORARIES_BYTES + self.shape.expanded_bytes(
            self.max_num_batched_tokens, self.gpu.multiplies(self.num_gpus)
        )
        per_gpu = self.gpu.memory_bytes * self.gpu_memory_utilization - temporaries
        return per_gpu * self.num_gpus - self.param_bytes

    @property
    def cost(self) -> CostTable | Roofline:
        """Cost model of a step."""
        return self.costs or Roofline(
            self.gpu, self.shape, self.num_gpus, self.weight_bits, self.kv_dtype_bytes,
            embedding_bits=self.embedding_bits,
        )  # fmt: skip

    @property
    def block_move_s(self) -> float:
        """Seconds of moving a block to the host or back, over the links of all GPUs."""
        return self._block_bytes / (BANDWIDTH_SHARE * self.gpu.host_bandwidth * self.num_gpus)

    @property
    def block_swap_cost(self) -> float:
        """Cost of moving a block to the host and back, in tokens that the largest step computes in that time."""
        tokens = self.max_num_batched_tokens
        return 2 * self.block_move_s / self.cost.seconds(StepLoad(1, tokens, 1, tokens, tokens**2 / 2)) * tokens

    def engine(self, users: int, cost: StepCost | None = None) -> VirtualEngine:
        """Return a new engine with empty memory; `cost` replaces the cost model."""
        most = min(users, MAX_USERS, self.max_num_batched_tokens)  # each sequence needs a token of a step
        limits = Limits(self.max_model_len, self.max_num_seqs or most, self.max_num_batched_tokens, self.block_size)
        make = partial(
            BlockPool, block_size=self.block_size, windows=self.groups.windows, reach=limits.max_tokens_in_flight
        )
        pool = make(self.num_blocks, num_pages=self.num_pages, enable_prefix_caching=self.enable_prefix_caching)
        num_host_blocks, host_pool = int(self.host_bytes / self._block_bytes), None
        if num_host_blocks and self.enable_prefix_caching:
            host_pool = make(num_host_blocks, enable_prefix_caching=False, copies_of=pool)
        scheduler = Scheduler(
            pool, limits, vocab_size=VOCAB_SIZE, host_pool=host_pool, preemption="recompute", headroom=HEADROOM,
            block_swap_cost=self.block_swap_cost if host_pool else 0.0, pinned_share=EngineConfig.pinned_share,
        )  # fmt: skip
        return VirtualEngine(scheduler, cost or self.cost, block_move_s=self.block_move_s)
