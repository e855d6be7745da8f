"""Adapters of a runner: all of them on the host, and those in use in slots on the device."""

from typing import Any, cast

import jax
import numpy as np

from jpaged.core.commands import LoadAdapter
from jpaged.core.plan import StepPlan
from jpaged.models.adapters import Adapter, Slots, SlotsForm, write_slot
from jpaged.runtime.identity import hash_arrays
from jpaged.runtime.placement import Placement, usable
from pallas_kernels import LowRank


class AdapterStore:
    """Owner of the slots, and of the adapters that plans name by their numbers.

    Attributes:
        slots: the slots on the device; None: there are none.
    """

    def __init__(self, form: SlotsForm | None, placement: Placement):
        self.form, self._placement = form, placement
        self._adapters: dict[int, Adapter] = {}
        self._fingerprints: dict[int, str] = {}
        self._shardings = _shardings(form, placement)
        shardings = self._shardings, placement.whole, placement.whole
        self._write = jax.jit(write_slot, donate_argnums=0, in_shardings=shardings, out_shardings=self._shardings)
        self.slots: Slots | None = self._empty()

    def _empty(self) -> Slots | None:
        return None if self.form is None else jax.device_put(self.form.empty(), self._shardings)

    def check(self, command: LoadAdapter) -> None:
        """Raise ValueError if there are no slots, or the adapter does not fit them."""
        if self.form is None:
            raise ValueError("adapter: this engine has no slots for adapters (enable_lora)")
        self.form.check(command.adapter)

    def load(self, command: LoadAdapter) -> None:
        """Keep an adapter. Its arrays are referenced, and copied when a plan loads them into a slot."""
        self.check(command)
        self._adapters[command.number] = command.adapter

    def unload(self, number: int) -> None:
        """Forget an adapter that no request uses."""
        del self._adapters[number]
        self._fingerprints.pop(number, None)

    def apply(self, plan: StepPlan) -> None:
        """Load a plan's adapters into their slots."""
        for number, slot in plan.adapters:
            self._load(self._adapters[number], slot)

    def _load(self, adapter: Adapter, slot: int) -> None:
        """Write an adapter into a slot. The call copies its arrays of NumPy to the device."""
        assert self.form is not None, "plans load adapters only into slots"
        place = lambda array: self._placement.put(array) if isinstance(array, jax.Array) else array
        padded = jax.tree.map(place, self.form.padded(adapter))
        with jax.transfer_guard("allow"):
            self.slots = self._write(self.slots, padded, np.int32(slot))

    def recover(self) -> None:
        """Allocate the slots again, empty, if a failed load has lost them."""
        if not usable(jax.tree.leaves(self.slots)):
            self.slots = self._empty()

    def warm_up(self) -> None:
        """Compile the load of an adapter."""
        if self.form is not None:
            self._load(Adapter({}, {}), 0)

    def fingerprint(self, number: int) -> str:
        """Return the hash of an adapter's arrays and scales."""
        if number not in self._fingerprints:
            adapter = self._adapters[number]
            arrays = {f"{name}.{part}": jax.numpy.asarray(array) for name, pair in adapter.pairs.items()
                      for part, array in pair._asdict().items()}  # fmt: skip
            self._fingerprints[number] = hash_arrays(repr(dict(adapter.scales)), arrays)
        return self._fingerprints[number]


def _shardings(form: SlotsForm | None, placement: Placement) -> tuple[LowRank, ...] | None:
    """Return the shardings of slots: outputs and inputs are divided as those of the weights that they change."""
    if form is None:
        return None
    forms = [(placement.of_axes(None, None, inputs), placement.of_axes(None, None, outputs))
             for outputs, inputs in form.axes.values()]  # fmt: skip
    return tuple(LowRank(*cast(tuple[Any, Any], form)) for form in forms)
