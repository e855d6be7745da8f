"""Transformations of jax that ops refuse, derivatives of products, and the mark of arrays that `shard_map` divides."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax import lax


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def no_derivative[T](op: str, arrays: T) -> T:
    """Return `arrays` unchanged; NotImplementedError if `jax.grad`, `jax.jvp` or the like differentiates by one."""
    return arrays


@no_derivative.defjvp
def _refuse_derivative(op: str, primals: Any, tangents: Any) -> Any:
    raise NotImplementedError(
        f"{op} has no derivative: differentiate dense attention, or take arguments from jax.lax.stop_gradient"
    )


def no_vmap[T](op: str, arrays: T) -> T:
    """Return `arrays` unchanged; NotImplementedError if `jax.vmap` maps over one of them."""
    unchanged = jax.custom_batching.custom_vmap(lambda arrays: arrays)

    @unchanged.def_vmap
    def refuse(size: int, mapped: Any, arrays: Any) -> Any:
        raise NotImplementedError(f"{op} does not support jax.vmap: use jax.lax.map, or one batch of all sequences")

    same: T = unchanged(arrays)
    return same


def varying_like[T](x: T, like: Any) -> T:
    """Mark arrays as different on the devices of a `shard_map` along the axes where any array of `like` is.

    The start value of a loop must have the same mark as the loop's result.
    """
    axes = frozenset[str]().union(*(jax.typeof(array).manual_axis_type.varying for array in jax.tree.leaves(like)))

    def mark(array: jax.Array) -> jax.Array:
        missing = axes - jax.typeof(array).manual_axis_type.varying
        cast: jax.Array = lax.pcast(array, tuple(sorted(missing)), to="varying")
        return cast

    marked: T = jax.tree.map(mark, x)
    return marked


def with_derivatives[**P, R](define: Callable[P, R]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator that gives an implementation of an op the derivatives of a definition."""

    def decorate(compute: Callable[P, R]) -> Callable[P, R]:
        op = jax.custom_jvp(compute)

        @op.defjvp
        def differentiate(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
            _, tangents_to = jax.jvp(define, primals, tangents)
            return op(*primals), tangents_to

        return op

    return decorate
