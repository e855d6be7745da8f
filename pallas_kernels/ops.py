"""The ops: their signatures, documentation and checks, in one place for all implementations.

Every op is a pure function. Results have q's dtype. The bits of a sequence's result depend neither on the other
sequences of the batch nor on the chunks of a prompt. A slot that no sequence has written never enters a result.

A pool's head dim may be larger than the head dim of q, k and v: the further columns hold zeros. Thus a kernel serves
smaller head dims than its own. A pool may be float8_e4m3fn, with a scale per KV head for keys and values.

Arguments are arrays of jax or NumPy. `product`, `low_rank` and `rms_norm` have derivatives: `jax.grad` through any
other op is an error.

All ops raise ValueError for shapes and dtypes that do not fit together, and NotImplementedError for arguments that the
implementation does not support.
"""

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels import checks, lora, norm, recurrent, reference, sampling
from pallas_kernels.options import (
    AttentionOptions,
    Chains,
    Contexts,
    LowRank,
    Masks,
    OutputAndLse,
    Pools,
    ProductOptions,
    WriteOptions,
    Written,
)
from pallas_kernels.transforms import no_derivative
from pallas_kernels.tuning import Tiles
from pallas_kernels.weights import Weight


class Implementation(NamedTuple):
    """Functions that compute the ops of `Ops` on arguments whose shapes and dtypes have been checked.

    The attention functions return the output and the log-sum-exp. `ragged_paged_attention` takes `cu_q_lens_s1` and
    `decode_s` before the options. `skips_rows`: whether products cost nothing for single rows that `wanted_t` leaves
    out. `least_rows`: number of rows up to which a product costs as much as that of one row. `low_rank`: None if it is
    computed by products.
    """

    write_kv: Callable[[Pools, jax.Array, jax.Array, jax.Array, WriteOptions], Written]
    copy_blocks: Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
    paged_decode_attention: Callable[[jax.Array, Contexts, AttentionOptions], OutputAndLse]
    ragged_paged_attention: Callable[[jax.Array, Contexts, jax.Array, jax.Array | None, AttentionOptions], OutputAndLse]
    product: Callable[[jax.Array, tuple[Weight, ...], ProductOptions], tuple[jax.Array, ...]] = reference.product
    skips_rows: bool = False
    least_rows: int = 1
    low_rank: Callable[[jax.Array, Sequence[LowRank], jax.Array], tuple[jax.Array, ...]] | None = None
    delta_rule: Callable[..., tuple[jax.Array, jax.Array]] = recurrent.delta_rule
    causal_conv: Callable[..., tuple[jax.Array, jax.Array]] = recurrent.causal_conv
    rms_norm: Callable[[jax.Array, jax.Array, float, float], jax.Array] = norm.rms_norm
    argmax_and_lse: Callable[..., tuple[jax.Array, jax.Array]] = sampling.argmax_and_lse
    gumbel_argmax: Callable[..., jax.Array] = sampling.gumbel_argmax
    gumbel: Callable[[jax.Array, jax.Array, jax.Array], jax.Array] = sampling.gumbel
    ranks: Callable[[jax.Array, jax.Array, jax.Array], jax.Array] = sampling.ranks
    top: Callable[[jax.Array, int], tuple[jax.Array, jax.Array]] = sampling.top


# Ops that a module may lack. The definition in jnp stands in for them.
OPTIONAL = (
    "product", "low_rank", "delta_rule", "causal_conv", "rms_norm", "argmax_and_lse", "gumbel_argmax", "gumbel",
    "ranks", "top",
)  # fmt: skip


def load(module: str, tiles: Mapping[str, Tiles] | None = None) -> Implementation:
    """Import an implementation, and bind its attention functions to their tiles by "decode" and "ragged"."""
    code = importlib.import_module(module)
    decode, ragged = code.paged_decode_attention, code.ragged_paged_attention
    if tiles:
        # Decode steps and mixed steps cut decode tokens into the same tiles, because the bits must be the same.
        decode = partial(decode, tiles=tiles.get("decode"))
        ragged = partial(ragged, tiles=tiles.get("ragged"), decode_tiles=tiles.get("decode"))
    optional = {op: getattr(code, op) for op in OPTIONAL if hasattr(code, op)}
    optional |= dict(skips_rows=getattr(code, "SKIPS_ROWS", False), least_rows=getattr(code, "LEAST_ROWS", 1))
    return Implementation(code.write_kv, code.copy_blocks, decode, ragged)._replace(**optional)


@dataclass(frozen=True)
class Ops:
    """The ops of one implementation.

    Attributes:
        debug: also check the values of tables, lengths and slots, by `jax.experimental.checkify`: a wrong one is a
            ValueError that names it. Inside a jit that needs `checkify.checkify` around the function.
        int8_rows: products round rows to int8 next to weights that take such rows; see `ProductOptions`.
    """

    implementation: Implementation
    debug: bool = False
    int8_rows: bool = False

    def write_kv(
        self,
        k_pool: jax.Array,
        v_pool: jax.Array,
        k_tkh: jax.Array,
        v_tkh: jax.Array,
        slot_mapping_t: jax.Array,
        *,
        cos_t: jax.Array | None = None,
        sin_t: jax.Array | None = None,
        k_scale_k: jax.Array | None = None,
        v_scale_k: jax.Array | None = None,
        q_tnh: jax.Array | None = None,
    ) -> tuple[jax.Array, ...]:
        """Write token t's key and value into flat slot `slot_mapping[t]` of pools [P, K, B, H]; -1 writes nothing.

        In place if the enclosing jit donates the pools and returns them in the order of its arguments; otherwise XLA
        copies them first. Numbers past ±448 scales are cut off in an fp8 pool.

        Args:
            k_tkh, v_tkh: [T, K, H], the pools' dtype; any float dtype for fp8 pools; float32 also for
                pools of 16 bits.
            slot_mapping_t: [T] int32, `block_id * B + offset`; no two tokens may name the same one.
            cos_t, sin_t: [T, H/2] float32; keys are rotated by them before the write (half against half, RoFormer,
                arXiv 2104.09864). Without them keys are written unchanged.
            k_scale_k, v_scale_k: [K] float32, for fp8 pools.
            q_tnh: [T, N, H], queries of the tokens, N a multiple of K, in the dtype of k; they need the angles.

        Returns:
            Both pools, with `q_tnh` also the rotated queries: a GPU rotates them in the same launch.
        """
        pools, k_tkh, v_tkh, slot_mapping_t, *optional = _arrays(
            "write_kv", (k_pool, v_pool), k_tkh, v_tkh, slot_mapping_t, cos_t, sin_t, k_scale_k, v_scale_k, q_tnh
        )
        options = WriteOptions(*optional)
        checks.check_write(pools, k_tkh, v_tkh, slot_mapping_t, options)
        if self.debug:
            checks.check_slots(slot_mapping_t, pools[0].shape[0], pools[0].shape[2])
        written = self.implementation.write_kv(pools, k_tkh, v_tkh, slot_mapping_t, options)
        return tuple(array for array in written if array is not None)

    def copy_blocks(self, pool: jax.Array, sources_c: jax.Array, destinations_c: jax.Array) -> jax.Array:
        """Copy whole blocks of a pool [P, ...]; all are read before any is written; destination -1 copies nothing.

        Args:
            sources_c, destinations_c: [C] int32; no two copies may have the same destination.
        """
        pool, sources_c, destinations_c = _arrays("copy_blocks", pool, sources_c, destinations_c)
        checks.check_copy(pool, sources_c, destinations_c)
        if self.debug:
            checks.check_copies(sources_c, destinations_c, pool.shape[0])
        return self.implementation.copy_blocks(pool, sources_c, destinations_c)

    def paged_decode_attention(
        self,
        q_snh: jax.Array,
        k_pool: jax.Array,
        v_pool: jax.Array,
        block_tables_sw: jax.Array,
        context_lens_s: jax.Array,
        *,
        scale: float,
        soft_cap: float | None = None,
        window: int | None = None,
        k_scale_k: jax.Array | None = None,
        v_scale_k: jax.Array | None = None,
        sinks_n: jax.Array | None = None,
        work: Any = None,
        return_lse: bool = False,
    ) -> jax.Array | OutputAndLse:
        """Compute attention of one query token per sequence over its paged context.

        Args:
            q_snh: [S, N, H].
            k_pool, v_pool: [P, K, B, H] with N a multiple of K, q's dtype or fp8, for a float32 q also 16 bits; they
                already hold the query tokens' own keys and values.
            block_tables_sw: [S, W] int32; entries past a context are never read. W B is at most 131,072.
            context_lens_s: [S] int32, the query token included; 0 marks padding, whose result is 0.
            scale, soft_cap, window, k_scale_k, v_scale_k, sinks_n, work: see `AttentionOptions`.
            return_lse: also return the log of the sum of exp(score), natural, float32, -inf for a query without keys.
                `merge_attention` needs it to combine partial results. With sinks it includes them: of partial results
                of the same queries, only one may have them.

        Returns:
            [S, N, H], with `return_lse` also [S, N] float32.
        """
        contexts = Contexts(k_pool, v_pool, block_tables_sw, context_lens_s)
        options = AttentionOptions(scale, soft_cap, window, k_scale_k, v_scale_k, work, sinks_n)
        out = self._attend("paged_decode_attention", q_snh, contexts, (), options)
        return out if return_lse else out[0]

    def ragged_paged_attention(
        self,
        q_tnh: jax.Array,
        k_pool: jax.Array,
        v_pool: jax.Array,
        block_tables_sw: jax.Array,
        context_lens_s: jax.Array,
        cu_q_lens_s1: jax.Array,
        *,
        scale: float,
        soft_cap: float | None = None,
        window: int | None = None,
        k_scale_k: jax.Array | None = None,
        v_scale_k: jax.Array | None = None,
        sinks_n: jax.Array | None = None,
        decode_s: jax.Array | None = None,
        work: Any = None,
        return_lse: bool = False,
    ) -> jax.Array | OutputAndLse:
        """Compute causal attention of a mixed batch: chunks of prompts and single decode tokens, one after another.

        Args:
            q_tnh: [T, N, H]; sequence s owns queries `cu_q_lens[s]:cu_q_lens[s + 1]`, the last of its context. Query i
                of r has position `context_lens[s] - r + i` and sees the keys up to its own.
            cu_q_lens_s1: [S + 1] int32, from 0 to at most T, non-decreasing. A padding sequence has no queries.
            decode_s: [S] bool: the sequences whose single query is a decode token, with the result of
                `paged_decode_attention` to the bit; None: all sequences of one query. The query of any other
                sequence has the bits that it would have in a longer chunk.

        The other arguments are those of `paged_decode_attention`.

        Returns:
            [T, N, H], with `return_lse` also [T, N] float32; queries that no sequence owns are 0.
        """
        contexts = Contexts(k_pool, v_pool, block_tables_sw, context_lens_s)
        options = AttentionOptions(scale, soft_cap, window, k_scale_k, v_scale_k, work, sinks_n)
        out = self._attend("ragged_paged_attention", q_tnh, contexts, (cu_q_lens_s1, decode_s), options)
        return out if return_lse else out[0]

    def product(
        self,
        x_ti: jax.Array,
        weight: Weight,
        *,
        up: Weight | None = None,
        activation: str | None = None,
        dtype: DTypeLike | None = None,
        wanted_t: jax.Array | None = None,
        sizes_e: jax.Array | None = None,
        tokens_m: jax.Array | None = None,
        added: tuple[jax.Array, ...] | None = None,
        residual_to: jax.Array | None = None,
    ) -> jax.Array:
        """Compute the product of rows with a weight, f(x W^T + b), or gated f(x W^T + b) * (x U^T + c).

        Sums, bias, activation and gate are computed in float32 and rounded once, to the dtype of the result.

        Args:
            x_ti: [T, I], float32, bfloat16 or float16.
            up: the weight U of a gated product; None: it is not gated. With the activation swiglu_oai of gpt-oss, the
                second factor is clipped to ±7 and 1 is added.
            activation, dtype, wanted_t, sizes_e, tokens_m, added, residual_to: see `ProductOptions`.

        Returns:
            [T, O].
        """
        gated = up is not None
        options = ProductOptions(activation, gated, dtype, wanted_t, sizes_e, tokens_m, added, residual_to)
        (y_to,) = self._multiply(x_ti, (weight,) if up is None else (weight, up), options)
        return y_to

    def products(
        self,
        x_ti: jax.Array,
        *weights: Weight,
        dtype: DTypeLike | None = None,
        wanted_t: jax.Array | None = None,
        sizes_e: jax.Array | None = None,
        tokens_m: jax.Array | None = None,
        added: tuple[jax.Array, ...] | None = None,
    ) -> tuple[jax.Array, ...]:
        """Compute the products of the same rows with several weights, as `product` does, in one pass."""
        return self._multiply(x_ti, weights, ProductOptions(None, False, dtype, wanted_t, sizes_e, tokens_m, added))

    def low_rank(self, x_ti: jax.Array, pairs: Sequence[LowRank], slots_t: jax.Array) -> tuple[jax.Array, ...]:
        """Compute x A^T B of each row with the matrices of its slot, for each of some pairs, in float32.

        Args:
            x_ti: [T, I], float32, bfloat16 or float16.
            pairs: matrices of one dtype, of the same slots and rank.
            slots_t: [T] int32, the slot of each row; -1: it has none.

        Returns:
            [T, O] float32 for each pair; -0 for rows without a slot, which leaves the bits of sums that it is added to.
        """
        checks.check_low_rank(x_ti, pairs, slots_t)
        compute = self.implementation.low_rank or partial(lora.low_rank, self.implementation.product)
        return compute(x_ti, pairs, slots_t)

    def delta_rule(
        self,
        q_tkd: jax.Array,
        k_tkd: jax.Array,
        v_thv: jax.Array,
        log_decay_th: jax.Array,
        beta_th: jax.Array,
        states: jax.Array,
        chains: Chains,
    ) -> tuple[jax.Array, jax.Array]:
        """Compute the gated delta rule (Gated DeltaNet, arXiv 2412.06464) token by token.

        The state S [D, V] of a head is updated by each token: S *= exp(g), u = (v - k^T S) * beta, S += k u^T, and the
        output is q^T S. All of it is computed in float32, in one order of sums: a token's result has the same bits for
        any cut of its sequence into calls and chunks. The pages are written in place if the enclosing jit donates them.

        Args:
            q_tkd, k_tkd: [T, K, D], float32, bfloat16 or float16, normalized and scaled by the caller. Head h of the
                values uses head h // (H / K).
            v_thv: [T, H, V], float32, bfloat16 or float16; H a multiple of K.
            log_decay_th, beta_th: [T, H] float32, g (at most 0) and beta.
            states: [P, H, D, V] float32, the pages.
            chains: the sequences, and the pages that they read and write; see `Chains`.

        Returns:
            [T, H, V] in v's dtype, 0 for tokens that no sequence owns; and the pages.
        """
        arguments = _arrays("delta_rule", q_tkd, k_tkd, v_thv, log_decay_th, beta_th, states, chains)
        checks.check_delta_rule(*arguments)
        if self.debug:
            checks.check_chains(arguments[-1], len(q_tkd), len(states))
        return self.implementation.delta_rule(*arguments)

    def causal_conv(
        self,
        x_tc: jax.Array,
        weight_cw: jax.Array,
        bias_c: jax.Array | None,
        states: jax.Array,
        chains: Chains,
        activation: str | None = "silu",
    ) -> tuple[jax.Array, jax.Array]:
        """Compute the causal convolution of each channel over the last W inputs of its sequence.

        The state is the last W - 1 inputs, the oldest first. Sums, bias and activation are computed in float32 and
        rounded once. The pages are written in place if the enclosing jit donates them.

        Args:
            x_tc: [T, C], float32, bfloat16 or float16.
            weight_cw: [C, W], W at least 2, float32, bfloat16 or float16; column W - 1 is the factor of the token's own
                input.
            bias_c: [C], float32, bfloat16 or float16.
            states: [P, W - 1, C], x's dtype or float32, which hold inputs exactly.
            chains: the sequences, and the pages that they read and write; see `Chains`.
            activation: one of `reference.ACTIVATIONS`; None: none.

        Returns:
            [T, C] in x's dtype, 0 for tokens that no sequence owns; and the pages.
        """
        (x_tc, weight_cw, bias_c, states), chains = _arrays("causal_conv", (x_tc, weight_cw, bias_c, states), chains)
        checks.check_causal_conv(x_tc, weight_cw, bias_c, states, chains)
        if activation not in (None, *reference.ACTIVATIONS):
            raise ValueError(f"activation is {activation!r}, expected one of {[*reference.ACTIVATIONS]} or None")
        if self.debug:
            checks.check_chains(chains, len(x_tc), len(states))
        return self.implementation.causal_conv(x_tc, weight_cw, bias_c, states, chains, activation)

    def rms_norm(self, x_td: jax.Array, scale_d: jax.Array, *, epsilon: float, offset: float = 0.0) -> jax.Array:
        """Return x / sqrt(mean(x^2) + epsilon) * (scale + offset) of each row, computed in float32 and rounded once.

        Args:
            x_td: [T, D], float32, bfloat16 or float16.
            scale_d: [D], float32, bfloat16 or float16.

        Returns:
            [T, D] in x's dtype. A row has the same bits next to any other rows.
        """
        checks.check_rms_norm(x_td, scale_d)
        return self.implementation.rms_norm(x_td, scale_d, epsilon, offset)

    def argmax_and_lse(self, logits_sv: jax.Array, masks: Masks | None = None) -> tuple[jax.Array, jax.Array]:
        """Return the best token of each row and the log of the sum of the exponentials of its logits.

        Args:
            logits_sv: [S, V] float32.
            masks: the tokens that are allowed; the logits of others count as -inf. None: all.

        Returns:
            [S] int32, the first of equal tokens, any one in a row with NaN; and [S] float32: -inf for a row of -inf,
            not finite for a row with NaN or an infinite logit. A row has the same bits next to any other rows.
        """
        logits_sv, masks = _arrays("argmax_and_lse", logits_sv, masks)
        checks.check_logits(logits_sv, masks=masks)
        return self.implementation.argmax_and_lse(logits_sv, masks)

    def gumbel_argmax(
        self, logits_sv: jax.Array, temperature_s: jax.Array, seeds_s2: jax.Array, positions_s: jax.Array,
        masks: Masks | None = None,
    ) -> jax.Array:  # fmt: skip
        """Draw a token of each row from softmax(logits / temperature): the best one with the noise of `gumbel` added.

        Args:
            logits_sv: [S, V] float32.
            temperature_s: [S] float32; a row with 0 is not drawn: its result is 0.
            seeds_s2: [S, 2] uint32.
            positions_s: [S] int32.
            masks: as `argmax_and_lse` has them.

        Returns:
            [S] int32, the first of equal tokens.
        """
        arguments = _arrays("gumbel_argmax", logits_sv, temperature_s, seeds_s2, positions_s, masks)
        checks.check_logits(logits_sv, temperature_s=temperature_s, masks=arguments[-1])
        checks.check_noise(seeds_s2, positions_s, len(logits_sv))
        return self.implementation.gumbel_argmax(*arguments)

    def gumbel(self, seeds_s2: jax.Array, positions_s: jax.Array, tokens_sk: jax.Array) -> jax.Array:
        """Return Gumbel noise that depends on the seed and the position of its row and on its token only.

        It is the noise of `jax.random.gumbel` for a key made by `fold_in` of the seed, the position and the token, up
        to the rounding of the logarithm.

        Args:
            seeds_s2, positions_s: as `gumbel_argmax` has them.
            tokens_sk: [S, K] int32.

        Returns:
            [S, K] float32.
        """
        arguments = _arrays("gumbel", seeds_s2, positions_s, tokens_sk)
        checks.check_noise(seeds_s2, positions_s, len(tokens_sk))
        checks.check_array("tokens_sk", tokens_sk, tokens_sk.shape, jnp.int32)
        return self.implementation.gumbel(*arguments)

    def ranks(self, logits_sv: jax.Array, tokens_s: jax.Array, wanted_s: jax.Array) -> jax.Array:
        """Return 1 + the number of higher logits for a token of each row, [S] int32; 0 for rows that are not wanted.

        Args:
            logits_sv: [S, V] float32.
            tokens_s: [S] int32, below V.
            wanted_s: [S] bool.
        """
        arguments = _arrays("ranks", logits_sv, tokens_s, wanted_s)
        checks.check_logits(logits_sv)
        checks.check_array("tokens_s", tokens_s, logits_sv.shape[:1], jnp.int32)
        checks.check_array("wanted_s", wanted_s, logits_sv.shape[:1], jnp.bool_)
        return self.implementation.ranks(*arguments)

    def top(self, x_sv: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
        """Return the k <= V best tokens of each row, [S, k] int32, best first and equal ones by id, and their numbers.

        Args:
            x_sv: [S, V] float32.
        """
        (x_sv,) = _arrays("top", x_sv)
        checks.check_logits(x_sv)
        if not 0 <= k <= x_sv.shape[1]:
            raise ValueError(f"k is {k}, expected 0 to {x_sv.shape[1]}")
        return self.implementation.top(x_sv, k)

    def _multiply(self, x_ti: jax.Array, weights: tuple[Weight, ...], options: ProductOptions) -> tuple[jax.Array, ...]:
        checks.check_product(x_ti, weights, options)
        return self.implementation.product(x_ti, weights, replace(options, int8_rows=self.int8_rows))

    def _attend(
        self, op: str, q: jax.Array, contexts: Contexts, rows: tuple[Any, ...], options: AttentionOptions
    ) -> OutputAndLse:
        """Check the arguments of an attention op and run it; `rows` are `cu_q_lens_s1` and `decode_s`, () of decode."""
        optional = options.k_scale_k, options.v_scale_k, options.sinks_n
        q, contexts, rows, (k_scale_k, v_scale_k, sinks_n) = _arrays(op, q, contexts, rows, optional)
        options = replace(options, k_scale_k=k_scale_k, v_scale_k=v_scale_k, sinks_n=sinks_n)
        cu_q_lens_s1, decode_s = rows or (None, None)
        checks.check_attention(q, contexts, cu_q_lens_s1, decode_s, options)
        if self.debug:
            checks.check_batch(q, contexts, cu_q_lens_s1)
        out: OutputAndLse = getattr(self.implementation, op)(q, contexts, *rows, options)
        return out


def _arrays(op: str, *arrays: Any) -> tuple[Any, ...]:
    """Return the arguments of an op as jax's arrays, None unchanged, and refuse to differentiate by them."""
    converted: tuple[Any, ...] = no_derivative(op, jax.tree.map(jnp.asarray, arrays))
    return converted
