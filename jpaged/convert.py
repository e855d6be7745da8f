"""`python -m jpaged.convert SOURCE TARGET --to orbax|safetensors`: the same parameters in another format."""

import argparse
import shutil
import sys
from pathlib import Path

from jpaged.config import ModelConfig
from jpaged.load import find_model, load_model
from jpaged.model.weights import INDEX, save_orbax, save_safetensors, stored_dtype

SAVE = {"orbax": save_orbax, "safetensors": save_safetensors}


def convert(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m jpaged.convert",
        description="Convert a model between safetensors and Orbax, exactly; config and tokenizer come along.",
    )
    parser.add_argument("source", help="a directory or a hub id")
    parser.add_argument("target", type=Path, help="the directory to make")
    parser.add_argument("--to", required=True, choices=sorted(SAVE))
    args = parser.parse_args(argv)
    try:
        source = find_model(args.source)
        config = ModelConfig.from_directory(source)
        dtype = stored_dtype(source)
        model = load_model(source, config, dtype=dtype, load_format="auto", seed=0, progress=True)
        args.target.mkdir(parents=True)
    except FileExistsError:
        sys.exit(f"convert: {args.target} already exists")
    except ValueError as error:
        sys.exit(f"convert: {error}")
    for file in source.iterdir():
        if file.is_file() and file.suffix != ".safetensors" and file.name != INDEX:
            shutil.copy(file, args.target)
    SAVE[args.to](model, args.target)
    print(f"{args.source} -> {args.target} ({args.to}, {dtype})")


if __name__ == "__main__":
    convert()
