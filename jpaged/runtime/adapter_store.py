"""Adapters of a runner: all of them on the host, and those in use in slots on the device."""

import jax
import numpy as np

from jpaged.core.commands import LoadAdapter
from jpaged.core.plan import StepPlan
from jpaged.models.adapters import Adapter, Slots, SlotsForm, write_slot
from jpaged.runtime.identity import hash_arrays
from jpaged.runtime.placement import Placement, usable


class AdapterStore:
    """Owner of the slots, and of the adapters that plans name by their numbers.

    Attributes:
        slots: the slots on the device; None: there are none.
    """

    def __init__(self, form: SlotsForm | None, placement: Placement):
        self.form, self._placement = form, placement
        self._adapters: dict[int, Adapter] = {}
        self._fingerprints: dict[int, str] = {}
        self._write = jax.jit(write_slot, donate_argnums=0, out_shardings=placement.whole)
        self.slots: Slots | None = None if form is None else placement.put(form.empty())

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
            assert self.form is not None, "plans load adapters only into slots"
            padded = self._placement.put(self.form.padded(self._adapters[number]))
            self.slots = self._write(self.slots, padded, self._placement.put(np.int32(slot)))

    def recover(self) -> None:
        """Allocate the slots again, empty, if a failed load has lost them."""
        if self.form is not None and not usable(jax.tree.leaves(self.slots)):
            self.slots = self._placement.put(self.form.empty())

    def warm_up(self) -> None:
        """Compile the load of an adapter."""
        if self.form is not None:
            empty = self._placement.put(self.form.padded(Adapter({}, {})))
            self.slots = self._write(self.slots, empty, self._placement.put(np.int32(0)))

    def fingerprint(self, number: int) -> str:
        """Return the hash of an adapter's arrays and scales."""
        if number not in self._fingerprints:
            adapter = self._adapters[number]
            arrays = {f"{name}.{part}": jax.numpy.asarray(array) for name, pair in adapter.pairs.items()
                      for part, array in pair._asdict().items()}  # fmt: skip
            self._fingerprints[number] = hash_arrays(repr(dict(adapter.scales)), arrays)
        return self._fingerprints[number]
