"""`jpaged verify` as a command: its table, its exit status, and the settings of its engine."""

import pytest

from jpaged.cli.main import main
from jpaged.replay import Replay, save
from tests.replay.test_file import OUTPUTS


@pytest.fixture
def path(tmp_path):
    save(OUTPUTS, tmp_path / "outputs.jsonl")
    return tmp_path / "outputs.jsonl"


@pytest.fixture
def engine(monkeypatch):
    """Let the command take an engine with known results. Returns its settings and results."""

    class Engine:
        results = (Replay("7", 0, True),)

        def __init__(self, **settings):
            Engine.settings = settings

        def replay(self, outputs, *, use_tqdm):
            assert outputs == OUTPUTS
            return self.results

    monkeypatch.setattr("jpaged.llm.LLM", Engine)
    return Engine


def test_equal_outputs_are_counted(engine, path, capsys):
    main(["verify", str(path), "--dtype", "float32", "--max-num-seqs", "4"])
    assert capsys.readouterr().out.split() == ["equal", "1", "different", "0", "not", "replayed", "0"]
    assert [engine.settings[name] for name in ("model", "dtype", "max_num_seqs")] == ["demo", "float32", 4]


def test_others_are_listed_and_the_status_is_1(engine, path, capsys):
    engine.results = [
        Replay("7", 0, True), Replay("7", 1, False, "token", 3, "1 in the output, 2 in the replay"),
        Replay("8", 0, False, "seed", reason="was changed", replayed=False), Replay("8", 1, True),
    ]  # fmt: skip
    with pytest.raises(SystemExit) as ended:
        main(["verify", str(path)])
    assert ended.value.code == 1
    assert capsys.readouterr().out.splitlines() == [
        "request 7, output 1: token 3: 1 in the output, 2 in the replay",
        "request 8, output 0: not replayed, seed: was changed",
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
