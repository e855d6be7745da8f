"""How fast the kernels and the engine are, measured on a GPU; see `gpu_suite.py --help`."""
