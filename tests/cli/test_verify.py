"""`jpaged verify` as a command: its table, its exit status, and the settings of its engine."""

import dataclasses

import pytest

from jpaged import SamplingParams
from jpaged.cli.main import main
from jpaged.replay import save


@pytest.fixture
def engine(demo, monkeypatch):
    """Let the command take the engine that tests share. Returns its settings."""
    given = {}

    def llm(**settings):
        given.update(settings)
        return demo

    monkeypatch.setattr("jpaged.llm.LLM", llm)
    return given


@pytest.fixture
def outputs(demo):
    return demo.generate(["One day", "The fox"], SamplingParams(n=2, max_tokens=4, certificate=True), use_tqdm=False)


def test_equal_outputs_are_counted(engine, outputs, tmp_path, capsys):
    save(outputs, path := tmp_path / "outputs.jsonl")
    main(["verify", str(path), "--dtype", "float32", "--max-num-seqs", "4"])
    assert capsys.readouterr().out.split() == ["equal", "4", "different", "0", "not", "replayed", "0"]
    assert (engine["model"], engine["dtype"], engine["max_num_seqs"]) == ("demo", "float32", 4)


def test_others_are_listed_and_the_status_is_1(engine, outputs, tmp_path, capsys):
    first, second = outputs[0].outputs
    changed = dataclasses.replace(first, token_ids=[first.token_ids[0], 1, *first.token_ids[2:]])
    without = dataclasses.replace(second, certificate=None)
    mixed = [dataclasses.replace(outputs[0], outputs=[changed, without]), outputs[1]]
    save(mixed, path := tmp_path / "outputs.jsonl")
    with pytest.raises(SystemExit) as ended:
        main(["verify", str(path)])
    assert ended.value.code == 1
    name = outputs[0].request_id
    assert capsys.readouterr().out.splitlines() == [
        f"request {name}, output 0: token 1: 1 in the output, {first.token_ids[1]} in the replay",
        f"request {name}, output 1: not replayed, certificate: missing; set certificate=True in the parameters",
        "equal             2",
        "different         1",
        "not replayed      1",
    ]


def test_a_file_without_outputs_is_refused(tmp_path):
    path = tmp_path / "outputs.jsonl"
    path.write_text("\n")
    with pytest.raises(SystemExit, match=r"outputs.jsonl: has no outputs$"):
        main(["verify", str(path)])
    with pytest.raises(SystemExit, match=r"No such file or directory: '.*none.jsonl'$"):
        main(["verify", str(tmp_path / "none.jsonl")])
