"""One step of the engine as functions of arrays: embed, attend over the pool, sample."""

import math
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

import pallas_kernels
from jpaged.config import MAX_DRAFTS, Limits
from jpaged.core.params import MAX_TOP
from jpaged.models.adapters import Slots, SlotsForm, attach
from jpaged.models.base import AttentionSpec, LayerOps, Model
from jpaged.models.layers import set_ops
from jpaged.runtime.batch import Batch, Bucket, Layout
from jpaged.runtime.device_rows import SamplingState
from jpaged.runtime.kv_cache import KVCache, Pool
from jpaged.runtime.placement import Placement
from jpaged.runtime.sampler import Sampled, SampleOptions, count_kept, kept_tokens, token_logprobs
from jpaged.runtime.sampling_row import COLUMNS, Sampling
from jpaged.runtime.sampling_settings import Settings
from jpaged.runtime.tensor_parallel import sample_divided, whole_logits
from pallas_kernels import ROW_ORDER, Kernels, Weight

# Command buffers (CUDA graphs) with conditions and loops: outside a command buffer the host waits for their predicates.
# XLA's own list lacks loops. An older driver leaves conditions out; the host then waits.
COMMAND_BUFFERS = "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE"

# Samples whose settings a CPU applies at once. Each takes six arrays of the vocabulary, and malloc returns more than
# 32 MiB after each step, whose pages then cost more time than the sampling.
CPU_SAMPLES = 16


def forward(
    model: Model, cache: KVCache, pool: Pool, batch: Batch, *, decode: bool, kernels: Kernels | None = None,
    adapters: tuple[Slots, SlotsForm] | None = None,
) -> tuple[jax.Array, Pool]:  # fmt: skip
    """Return the hidden states [T, D] of a batch, and the pool with its keys and values written.

    Args:
        decode: every sequence has one query, a decode token, and query s belongs to sequence s.
        kernels: the model's products are changed to theirs, without padding and, after the last attention, without
            the rows of tokens that have neither a sample nor a logprob.
        adapters: slots of adapters, which `batch.adapters` chooses from; None: no token has an adapter.
    """
    (pool, states), specs = cache.parts(list(pool)), model.attention_specs
    wanted_t = jnp.arange(len(batch.tokens)) < batch.num_tokens

    def attend(
        layer: int, q_tnh: jax.Array, k_tkh: jax.Array, v_tkh: jax.Array, *angles: Any,
        sinks_n: jax.Array | None = None,
    ) -> jax.Array:  # fmt: skip
        dtype = jnp.result_type(q_tnh, k_tkh, v_tkh)
        qkv = tuple(x.astype(cache.attention_dtype or x.dtype) for x in (q_tnh, k_tkh, v_tkh))
        spec = cast(AttentionSpec, specs[layer])
        o_tnh = cache.attend(pool, layer, spec, batch, decode, qkv, angles, sinks_n).astype(dtype)
        leave_rows(layer)
        return o_tnh

    def leave_rows(layer: int) -> None:
        """Let products after the last layer's ops skip tokens that have neither a sample nor a logprob."""
        nonlocal wanted_t
        if layer == len(specs) - 1 and not decode:
            sampled_t = jnp.zeros_like(wanted_t).at[batch.sampled_from].set(True)
            wanted_t &= sampled_t | jnp.any(batch.targets >= 0)

    def recur(layer: int, *arguments: jax.Array) -> jax.Array:
        o_thv = cache.states.recur(states, layer, batch, *arguments)
        leave_rows(layer)
        return o_thv

    def of_tokens(op: Callable[..., Any], *args: Any, **options: Any) -> Any:
        return _of_rows(wanted_t, op, *args, **options)

    if kernels is not None:
        product, products = partial(of_tokens, kernels.product), partial(of_tokens, kernels.products)
        set_ops(model, product=product, products=products, rms_norm=kernels.rms_norm)
    if adapters is not None:
        slots, form = adapters
        assert batch.adapters is not None, "slots have batches that choose from them"
        attach(model, form, slots, batch.adapters, (kernels or pallas_kernels).low_rank)
    convolve = lambda layer, *arguments: cache.states.convolve(states, layer, batch, *arguments)
    x_td = model(batch.tokens, batch.positions, LayerOps(attend, convolve, recur))
    return x_td, pool + states


def model_options(platform: str, *, has_quantized_weights: bool) -> dict[str, Any]:
    """Return XLA's options of the model's part of a step."""
    if platform == "cpu":
        return ROW_ORDER
    return {
        # XLA would hand a kernel a pointer to a slice, wherever it starts in its array: Mosaic's runtime refuses
        # pointers off a multiple of 256 bytes (openxla/xla pull request 43831 made this the default).
        "xla_gpu_enable_dynamic_slice_fusion": False,
        # XLA would concatenate the weights of several products of one array in every step.
        "xla_gpu_dot_merger_threshold_mb": 0,
        # cuBLAS takes no weights of 8 bits: they would be converted, into memory, in every step.
        **({"xla_gpu_cublas_fallback": False} if has_quantized_weights else {}),
    }


def sampling_options(platform: str) -> dict[str, Any]:
    """Return XLA's options of sampling and of the logprobs of prompts."""
    return ROW_ORDER if platform == "cpu" else {"xla_gpu_enable_command_buffer": COMMAND_BUFFERS}


class Computed(NamedTuple):
    """Results of the model's part of a step, on the device, for the other parts."""

    x_sd: jax.Array  # hidden states that samples are drawn from
    rows_sf: jax.Array  # int32, the words of their sampling rows
    x_td: jax.Array | None  # all hidden states; None in a decode step
    targets_t: jax.Array | None  # int32, the targets of the batch; None in a decode step


@dataclass(eq=False)
class Step:
    """Jitted functions of a step, dispatched one after the other.

    Each is compiled only for the shapes that it depends on. `params` is the flat list of the model's leaves, because
    dispatching a model or a state costs many times more on the host. Leaves that no result depends on are not used and
    may have been deleted. The pool is returned in the order of the argument, so that XLA can alias all of its buffers.

    Args:
        graphdef, treedef: of the model; the treedef is that of the list of its states.
        cache: the layout of the pool.
        layouts: layouts of the batches of each bucket.
        placement: the places of all arrays. Results other than the pool are whole on every device.
        processed_logprobs: whether the logprobs of samples are those after temperature, filters and the rest.
        kernels: the kernels of products; None: XLA's.
        adapters: the form of the slots of adapters; None: there are none.
        has_quantized_weights: whether weights have 8 bits.

    Attributes:
        forward: (params, pool, last_tokens [R], buffer, bucket, slots) -> (Computed, pool), the pool donated, the
            bucket static; `buffer` holds a batch in the bucket's layout. `slots` are those of adapters, or None in a
            step without.
        choose: (params, state, last_tokens, x_sd, rows_sf, bits, settings) -> (chosen, listed, state, last_tokens), the
            last two donated, the settings static. chosen: [3, S] int32, tokens, ranks, and the bits of the float32
            logprobs; listed: [2, S, K] int32, the most likely tokens, and the bits of their logprobs. `bits` are masks,
            [S, ceil(V / 32)] uint32.
        keep: (params, state, x_sd, rows_sf, bits, chosen) -> [S, ceil(V / 8)] uint8, the tokens that the samples of
            `choose` were drawn from; `state` is its result. It is compiled when it is first called.
        score: (params, x_td, targets_t) -> (chosen, listed) of the prompt's own tokens.
        settings: the settings that `choose` is compiled for, in ascending order.
    """

    graphdef: nnx.GraphDef[Model]
    treedef: jax.tree_util.PyTreeDef
    cache: KVCache
    layouts: dict[Bucket, Layout]
    placement: Placement
    _: KW_ONLY
    max_logprobs: int = Limits.max_logprobs
    processed_logprobs: bool = False
    kernels: Kernels | None = None
    adapters: SlotsForm | None = None
    has_quantized_weights: bool = False

    def __post_init__(self) -> None:
        whole, platform = self.placement.whole, self.placement.platform
        self._at_once = CPU_SAMPLES if platform == "cpu" else None
        self.settings = (Settings.ANY,) if platform == "cpu" or self.processed_logprobs else tuple(Settings)
        # Results on other devices than the arguments of the next step would need further executables.
        self.forward = jax.jit(
            self._forward, static_argnums=4, donate_argnums=1, out_shardings=(whole, self.placement.pool),
            compiler_options=model_options(platform, has_quantized_weights=self.has_quantized_weights),
        )  # fmt: skip
        jit = partial(jax.jit, out_shardings=whole, compiler_options=sampling_options(platform))
        self.choose = jit(self._choose, static_argnums=6, donate_argnums=(1, 2))
        self.score = jit(self._score)
        self.keep = jit(self._keep)

    def settings_for(self, used: Settings) -> Settings:
        """Return the settings of the executable for a step."""
        return used if used in self.settings else Settings.ANY

    def _merged(self, params: list[jax.Array]) -> Model:
        return nnx.merge(self.graphdef, *jax.tree.unflatten(self.treedef, params))

    def _forward(
        self, params: list[jax.Array], pool: Pool, last_tokens_r: jax.Array, buffer: jax.Array, bucket: Bucket,
        slots: Slots | None = None,
    ) -> tuple[Computed, Pool]:  # fmt: skip
        layout = self.layouts[bucket]
        batch = layout.whole_tables(layout.unpack(buffer))
        batch = batch._replace(tokens=_known(batch.tokens, last_tokens_r), decodes=batch.decodes != 0)
        model = self._merged(params)
        adapters = None if slots is None or self.adapters is None else (slots, self.adapters)
        x_td, pool = forward(
            model, self.cache, pool, batch, decode=bucket.decode, kernels=self.kernels, adapters=adapters
        )
        scored = (None, None) if bucket.decode else (x_td, batch.targets)
        return Computed(x_td[batch.sampled_from], batch.samples, *scored), pool

    def _choose(
        self, params: list[jax.Array], state: SamplingState, last_tokens_r: jax.Array, x_sd: jax.Array,
        rows_sf: jax.Array, bits: jax.Array, settings: Settings,
    ) -> tuple[jax.Array, jax.Array, SamplingState, jax.Array]:  # fmt: skip
        sampling = sampling_of(rows_sf, bits)
        sampling = sampling._replace(last_tokens=_known(sampling.last_tokens, last_tokens_r))
        num_top, several = max(MAX_TOP, self.max_logprobs), len(self.settings) > 1
        processed, at_once = self.processed_logprobs, self._at_once
        options = SampleOptions(num_top, processed, settings, several, at_once, self.cache.kernels)
        logits_sv = self._logits(params, x_sd, sampling)
        sampled, state = sample_divided(logits_sv, state, sampling, options, self.placement)
        at_s = jnp.where(sampling.rows < 0, len(last_tokens_r), sampling.rows)  # past the end: dropped
        return *_packed(sampled), state, last_tokens_r.at[at_s].set(sampled.tokens, mode="drop")

    def _keep(
        self, params: list[jax.Array], state: SamplingState, x_sd: jax.Array, rows_sf: jax.Array, bits: jax.Array,
        chosen: jax.Array,
    ) -> jax.Array:  # fmt: skip
        sampling = sampling_of(rows_sf, bits)
        state = count_kept(state, sampling, chosen[0], by=-1)
        logits_sv = whole_logits(self._logits(params, x_sd, sampling), self.placement)
        return kept_tokens(logits_sv, state, sampling, chosen[0], self.cache.kernels)

    def _logits(self, params: list[jax.Array], x_sd: jax.Array, sampling: Sampling) -> jax.Array:
        """Return the logits of samples; products skip samples of no row."""
        model = self._merged(params)
        if self.kernels is not None:
            of_samples = partial(_of_rows, sampling.rows >= 0)
            set_ops(model, product=partial(of_samples, self.kernels.product))
        return model.logits(x_sd)

    def _score(self, params: list[jax.Array], x_td: jax.Array, targets_t: jax.Array) -> tuple[jax.Array, jax.Array]:
        model = self._merged(params)
        if self.kernels is not None:
            set_ops(model, product=self.kernels.product)
        logits_of = lambda x_td: whole_logits(model.logits(x_td), self.placement)
        return _packed(token_logprobs(logits_of, x_td, targets_t, max(1, self.max_logprobs), self.cache.kernels))


def sampling_of(rows_sf: jax.Array, allowed_bits: jax.Array) -> Sampling:
    """Return the sampling settings of samples; `rows_sf` int32: the words of their rows, `allowed_bits` uint32."""
    settings, start = {}, 0
    for name, column in COLUMNS.items():
        end = start + math.prod(column.shape)
        words = rows_sf[:, start:end].reshape(len(rows_sf), *column.shape)
        settings[name] = words != 0 if column.dtype is bool else lax.bitcast_convert_type(words, column.dtype)
        start = end
    return Sampling(**settings, allowed_bits=allowed_bits, drafts=_drafts(**settings))


def _drafts(num_drafts: jax.Array, last_tokens: jax.Array, **_: jax.Array) -> jax.Array:
    """Return the drafts before each sample, the last one first, [S, MAX_DRAFTS] int32; -1 past them."""
    before_sk = jnp.arange(len(num_drafts))[:, None] - jnp.arange(MAX_DRAFTS)
    return jnp.where(jnp.arange(MAX_DRAFTS) < num_drafts[:, None], last_tokens[before_sk], -1)


def _of_rows(wanted_t: jax.Array, op: Callable[..., Any], x_ti: jax.Array, *weights: Weight, **options: Any) -> Any:
    """Call a product without the rows that are not wanted, unless its rows are others, such as heads."""
    is_of_rows = len(x_ti) == len(wanted_t) or options.get("tokens_m") is not None
    return op(x_ti, *weights, **options, wanted_t=wanted_t if is_of_rows else None)


def _known(tokens: jax.Array, last_tokens_r: jax.Array) -> jax.Array:
    """Return tokens in which `-1 - row` is replaced by the last sample of the row."""
    return jnp.where(tokens < 0, last_tokens_r[-1 - tokens], tokens)


def _packed(sampled: Sampled) -> tuple[jax.Array, jax.Array]:
    """Return [3, S] and [2, S, K] int32: the values fetched for every sample, and the lists."""
    bits = partial(lax.bitcast_convert_type, new_dtype=jnp.int32)
    chosen = jnp.stack([sampled.tokens, sampled.ranks, bits(sampled.logprobs)])
    return chosen, jnp.stack([sampled.top_tokens, bits(sampled.top_logprobs)])
