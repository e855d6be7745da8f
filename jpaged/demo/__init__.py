"""Demo model, a tiny Llama that comes with the package. Its training is in `tools/demo_model` of a checkout."""

from pathlib import Path

DIRECTORY = Path(__file__).parent / "model"
