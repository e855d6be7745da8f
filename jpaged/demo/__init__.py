"""The demo model: a tiny Llama that comes with the package, and the script and the text that it was trained with."""

from pathlib import Path

DIRECTORY = Path(__file__).parent / "model"
