"""The demo model, a tiny Llama that comes with the package; `tools/demo_model` in a checkout has its training."""

from pathlib import Path

DIRECTORY = Path(__file__).parent / "model"
