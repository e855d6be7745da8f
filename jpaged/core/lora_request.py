"""An adapter that a request names, in the form of vLLM."""

from dataclasses import dataclass


@dataclass(frozen=True)
class LoRARequest:
    """Adapter of a request.

    Attributes:
        lora_name: its name.
        lora_int_id: vLLM's number of it, which is not used.
        lora_path: its directory, as PEFT saves it, for a name that is not loaded.
    """

    lora_name: str
    lora_int_id: int = 0
    lora_path: str = ""
