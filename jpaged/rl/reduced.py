"""Reductions of floats with the same bits in any program.

On a CPU, XLA leaves reductions of large arrays to YNNPACK, with the operations around them. YNNPACK sums in another
order than XLA, and its exponentials round otherwise. The programs of an engine are compiled without it
(`pallas_kernels.ROW_ORDER`), which is not a choice of a function within a trainer's program.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun
from jax.extend.core.primitives import jit_p, reduce_max_p, reduce_sum_p

from pallas_kernels.reductions import max_by_xla, sum_by_xla

BY_XLA = {reduce_sum_p: sum_by_xla, reduce_max_p: max_by_xla}


def by_xla(function: Callable[[], Any]) -> Any:
    """Return the result of a function whose sums and maxima have the bits of `ROW_ORDER`. It has no derivatives.

    Reductions in the bodies of loops and conditions are left as they are.
    """
    closed, shapes = jax.make_jaxpr(function, return_shape=True)()
    return jax.tree.unflatten(jax.tree.structure(shapes), _evaluate(closed))


def _evaluate(closed: Any, *args: Any) -> list[Any]:
    """Return the results of a `ClosedJaxpr`."""
    jaxpr = closed.jaxpr
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*closed.consts, *args], strict=True))
    for equation in jaxpr.eqns:
        primitive, atoms = equation.primitive, equation.invars
        inputs = [atom.val if isinstance(atom, Literal) else values[atom] for atom in atoms]
        if primitive is jit_p:
            results = _evaluate(equation.params["jaxpr"], *inputs)
        elif primitive in BY_XLA and jnp.issubdtype(inputs[0].dtype, jnp.floating):
            results = [BY_XLA[primitive](inputs[0], equation.params["axes"])]
        else:
            known = {atom: values[atom] for atom in atoms if not isinstance(atom, Literal)}
            alone = jaxpr.replace(constvars=[], invars=[*known], outvars=equation.outvars, eqns=[equation])
            results = jaxpr_as_fun(ClosedJaxpr(alone, []))(*known.values())
        values.update(zip(equation.outvars, results, strict=True))
    return [atom.val if isinstance(atom, Literal) else values[atom] for atom in jaxpr.outvars]
