"""Write the API reference as HTML to a folder: `python -m tools.api_docs build/api`."""

import importlib
import sys
from pathlib import Path

import pdoc
import pdoc.render

# The packages show the names that they export; the modules define the classes that these return or take.
MODULES = (
    "jpaged",
    "jpaged.core.params",
    "jpaged.core.plan",
    "jpaged.core.request",
    "jpaged.engine.async_engine",
    "jpaged.engine.engine",
    "jpaged.models.base",
    "jpaged.models.registry",
    "pallas_kernels",
    "pallas_kernels.dispatch",
    "pallas_kernels.options",
    "pallas_kernels.selftest",
)


def main(directory: Path) -> None:
    # jpaged imports an exported name when it is first used, and pdoc documents only existing attributes.
    package = importlib.import_module("jpaged")
    for name in package.__all__:
        setattr(package, name, getattr(package, name))
    pdoc.render.configure(docformat="google")
    pdoc.pdoc(*MODULES, output_directory=directory)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
