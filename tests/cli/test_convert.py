"""`jpaged convert` as a command."""

import pytest

from jpaged.cli.main import main


def test_there_and_back(tiny, tmp_path, capsys):
    main(["convert", str(tiny), str(tmp_path / "orbax"), "--to", "orbax"])
    assert capsys.readouterr().out == f"{tiny} -> {tmp_path / 'orbax'} (orbax, float32)\n"
    main(["convert", str(tmp_path / "orbax"), str(tmp_path / "back"), "--to", "safetensors"])
    assert (tmp_path / "back" / "model.safetensors").is_file()
    assert (tmp_path / "back" / "tokenizer.json").read_bytes() == (tiny / "tokenizer.json").read_bytes()
    with pytest.raises(SystemExit, match=r"jpaged convert: error: target: .*/back already exists"):
        main(["convert", str(tiny), str(tmp_path / "back"), "--to", "orbax"])
