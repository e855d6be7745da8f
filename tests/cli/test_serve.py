"""`jpaged serve`: flags from the command line and from a file, and the settings that are checked before loading."""

import re
import socket
from pathlib import Path

import pytest

import server
from jpaged.cli import serve as cli_serve
from jpaged.cli.main import load as load_command
from jpaged.cli.main import main, parser
from jpaged.cli.parser import count
from jpaged.cli.serve import server_config
from jpaged.cli.setting_flags import config_of
from jpaged.config import DTYPES, EngineConfig
from jpaged.start import load
from jpaged.start.setup import prepare

ROOT = Path(__file__).parents[2]


def parsed(*flags):
    return parser("serve", load_command("serve"), "jpaged serve").parse_args(flags)


def refusal(capsys, *flags):
    """The line that a wrong command line ends with."""
    with pytest.raises(SystemExit) as ended:
        parsed(*flags)
    said = capsys.readouterr().err
    assert ended.value.code == 2 and said.count("\n") == 1
    return said.removeprefix("jpaged serve: error: ").strip()


@pytest.fixture
def nothing_loads(monkeypatch):
    def load_model(*_, **__):
        raise AssertionError("weights are loaded")

    monkeypatch.setattr(load, "load_model", load_model)


@pytest.fixture
def taken():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield str(listening.getsockname()[1])


def file(tmp_path, name, content):
    (tmp_path / name).write_text(content)
    return str(tmp_path / name)


def copy_of(model, directory):
    """A copy of a model's small files."""
    directory.mkdir()
    for path in model.iterdir():
        (directory / path.name).write_bytes(path.read_bytes())
    return directory


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--port", "{taken}"], "--host, --port: [Errno 98] error while attempting to bind on address"),
        (["--port", "70000"], "--host, --port: bind(): port must be 0-65535"),
        (["--host", "192.0.2.1"], "--host, --port: "),
        (["--uds", "{folder}"], "--uds: "),
        (["--root-path", "llm"], "root_path: must begin with / and not end with it, as /llm does, not 'llm'"),
        (["--served-model-name", ""], "--served-model-name must not be empty"),
        (["--allowed-origins", "[1"], "--allowed-origins: [1 is not valid JSON"),
        (["--max-model-len", "1k"], "max_model_len: 1000 exceeds the model's max_position_embeddings (512)"),
        (["--max-num-seqs", "8", "--num-gpu-blocks-override", "7"], "max_num_seqs: 8 exceeds the 7 blocks"),
        (["--kernels", "mosaic"], "Mosaic GPU kernels need a Hopper GPU"),
        (["--chat-template", "{template}"], "chat_template: line 2: "),
        (["--tokenizer", "/no/where"], "model: /no/where is not a directory"),
        (["--tokenizer", "{folder}"], "tokenizer: the tokenizer of {folder} can't be loaded"),
        (["--tokenizer", "demo", "--skip-tokenizer-init"], "skip_tokenizer_init: can't be combined with tokenizer"),
        (["--revision", "main"], "revision: only a hub id has revisions"),
        (
            ["--quantization", "awq"],
            "quantization: the checkpoint is not quantized, so it can be None or one of int8, fp8",
        ),
        (
            ["--hf-overrides", '{"rope_tehta": 1}'],
            "hf_overrides: rope_tehta is not a field of the model's config.json that can be replaced; did you mean",
        ),
        (["--hf-overrides.num_attention_heads", "x"], "config.json, generation_config.json, hf_overrides: "),
        (["--rope-scaling", '{"rope_type": "dynamic"}'], "rope_type: 'dynamic' is not supported"),
        (["--override-generation-config", '{"top_p": 2}'], "override_generation_config: top_p: must be above 0"),
        (
            ["--override-generation-config", '{"eos": 2}'],
            "override_generation_config: eos is not supported; supported: ",
        ),
        (["--kv-cache-memory-bytes", "1k"], "kv_cache_memory_bytes: must be at least "),
        (["--kv-cache-memory-bytes", "9000G"], "kv_cache_memory_bytes: "),
        (
            ["--kv-cache-memory-bytes", "1G", "--num-gpu-blocks-override", "9"],
            "can't be combined with num_gpu_blocks_override",
        ),
    ],
)
def test_serve_refuses_before_weights_are_loaded(flags, words, tiny, tmp_path, taken, nothing_loads):
    template = file(tmp_path, "t.jinja", "{{ messages }}\n{% for %}")
    places = {"{taken}": taken, "{folder}": str(tmp_path), "{template}": template}
    with pytest.raises(SystemExit) as ended:
        main(["serve", str(tiny), "--port", "0", *(places.get(flag, flag) for flag in flags)])
    said = str(ended.value.code)
    assert words.replace("{folder}", str(tmp_path)) in said and "\n" not in said


def test_serve_loads_weights_once_all_is_checked(tiny, nothing_loads):
    with pytest.raises(AssertionError, match="weights are loaded"):
        main(["serve", str(tiny), "--port", "0"])


@pytest.mark.parametrize(
    "text, value",
    [("4096", 4096), ("1k", 1000), ("1K", 1024), ("25.6k", 25600), ("32k", 32000), ("2m", 2 * 10**6), ("2M", 2**21),
     ("1g", 10**9), ("1G", 2**30), ("-1", -1)],
)  # fmt: skip
def test_counts_have_units(text, value):
    assert count(text) == value == parsed(f"--max-num-seqs={text}").max_num_seqs


@pytest.mark.parametrize("text", ["", "k", "1.5", "1.5K", "1kk", "1 k", "1e3", "all"])
def test_counts_refuse_other_texts(text, capsys):
    assert f"argument --max-model-len: {text!r} is no number such as" in refusal(capsys, f"--max-model-len={text}")


def test_the_model_is_positional_or_a_flag(capsys):
    assert parsed("a").model == parsed("--model", "a").model == "a" and parsed().model == "demo"
    assert parsed("a", "--port", "1").model == parsed("--port", "1", "a").model == "a"
    assert "not allowed with argument" in refusal(capsys, "a", "--model", "b")


def test_flags_may_have_underscores(capsys):
    assert parsed("--max_model_len", "8", "--max_num_seqs=3").max_num_seqs == 3
    assert refusal(capsys, "--max_modle_len", "8") == "unknown flag --max_modle_len; did you mean --max-model-len?"


@pytest.mark.parametrize("given, dtype", [("half", "float16"), ("float", "float32"), ("bfloat16", "bfloat16")])
def test_dtypes_have_vllms_names_too(given, dtype, tiny):
    config = config_of(parsed(str(tiny), "--dtype", given), EngineConfig)
    assert prepare(config).resolved.dtype == dtype and dtype in DTYPES


def test_several_served_names():
    args = parsed("--served-model-name", "a", "b", "c")
    assert args.served_model_name[0] == "a" and server_config(args).aliases == ("b", "c")


def test_allowed_origins_may_be_json_as_vllm_has_them():
    assert server_config(parsed("--allowed-origins", '["*"]')).allowed_origins == ("*",)
    assert server_config(parsed("--allowed-origins", "a", "b")).allowed_origins == ("a", "b")


def test_config_gives_flags_and_the_command_line_wins(tmp_path):
    path = file(
        tmp_path, "serve.yaml",
        "model: org/name\nport: 9000\nmax_model_len: 32k\nserved-model-name: [a, b]\nallowed-origins: x\nseed: -3\n"
        "enable-prefix-caching: false\ntrust-request-chat-template: true\nskip-tokenizer-init: false\n"
        "pipeline-parallel-size: 1\ntrust-remote-code: true\nenforce-eager: false\n",
    )  # fmt: skip
    args = parsed("--port", "1", "--config", path)
    assert (args.model, args.port, args.max_model_len, args.seed) == ("org/name", 1, 32000, -3)
    assert args.served_model_name == ["a", "b"] and args.allowed_origins == ["x"]
    assert not args.enable_prefix_caching and args.trust_request_chat_template and not args.skip_tokenizer_init
    assert args.notices == [
        "--pipeline-parallel-size: the default", f"--trust-remote-code: {NO_CODE}", f"--enforce-eager: {COMPILED}",
    ]  # fmt: skip
    args = parsed("mine", f"--config={path}", "--enable-prefix-caching", "--served-model-name", "c")
    assert (args.model, args.port, args.served_model_name) == ("mine", 9000, ["c"]) and args.enable_prefix_caching
    assert (
        parsed("--config", file(tmp_path, "no.yaml", "no-enable-prefix-caching: true")).enable_prefix_caching is False
    )


NO_CODE = "not needed, no model brings code of its own"
COMPILED = "not needed, every shape is compiled before the server is ready"


@pytest.mark.parametrize(
    "content, words",
    [
        ("max-modle-len: 3", "{path}: unknown key max-modle-len; did you mean max-model-len?"),
        ("frobnicate: 3", "{path}: unknown key frobnicate"),
        ("config: other.yaml", "{path}: unknown key config"),
        ("port:", "{path}: port: a value is missing"),
        ("port: yes", "{path}: port: True is no value of this flag"),
        ("port: [1, 2]", "{path}: port: takes one value, not a list"),
        ("port: {a: 1}", "{path}: port: a mapping is no value of a flag"),
        ("enable-prefix-caching: 3", "{path}: enable-prefix-caching: must be true or false, not 3"),
        ("- port", "{path} must have flags as keys"),
        ("port: [", "{path} is not valid YAML"),
    ],
)
def test_config_refuses_other_keys_and_values(content, words, tmp_path, capsys):
    path = file(tmp_path, "serve.yaml", content)
    assert refusal(capsys, "--config", path).startswith("--config: " + words.replace("{path}", path))


def test_config_of_the_documentation_is_taken(tmp_path):
    (block,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "operation.md").read_text(), re.DOTALL)
    args = parsed("--config", file(tmp_path, "serve.yaml", block))
    assert args.max_model_len == 32_000 and args.served_model_name == ["name", "alias"]


def test_default_sampling_parameters_come_from_the_model_and_overrides(monkeypatch, tiny, tmp_path):
    given = []

    def service(*_, sampling_defaults, **__):
        given.append(sampling_defaults)
        raise ValueError("enough")

    model = copy_of(tiny, tmp_path / "model")
    (model / "generation_config.json").write_text('{"temperature": 0.7, "top_k": 5}')
    monkeypatch.setattr(load, "start_engine", lambda *_, **__: None)
    monkeypatch.setattr(cli_serve, "Service", service)
    override = ["--override-generation-config", '{"min_p": 0.1}', "--override-generation-config.top_k", "7"]
    for flags in ([], ["--generation-config", "vllm"], override, ["--sampling-defaults", "openai", *override]):
        with pytest.raises(SystemExit, match="enough"):
            main(["serve", str(model), "--port", "0", *flags])
    own, overridden = {"temperature": 0.7, "top_k": 5}, {"min_p": 0.1, "top_k": 7}
    assert given == [own, {}, own | overridden, overridden]


def test_config_refuses_as_the_command_line_does(tmp_path, capsys):
    assert refusal(capsys, "--config", file(tmp_path, "a", "port: x")) == "argument --port: invalid int value: 'x'"
    assert "No such file" in refusal(capsys, "--config", str(tmp_path / "none"))
    assert refusal(capsys, "--config") == "argument --config: expected one argument"


def test_server_py_takes_the_same_flags(tmp_path):
    path = file(tmp_path, "serve.yaml", "port: 9000")
    assert server.parse_args(["a", "--config", path]).port == 9000


def test_a_directory_without_a_tokenizer_is_served_with_token_ids(tmp_path, tiny, caplog):
    directory = tmp_path / "model"
    directory.mkdir()
    for name in ("config.json", "generation_config.json"):
        (directory / name).write_bytes((tiny / name).read_bytes())
    assert prepare(config_of(parsed(str(directory)), EngineConfig)).tokenizer is None
    assert "has no tokenizer: requests must be token ids" in caplog.text
    assert prepare(config_of(parsed(str(tiny), "--skip-tokenizer-init"), EngineConfig)).tokenizer is None
    other = prepare(config_of(parsed(str(directory), "--tokenizer", str(tiny)), EngineConfig)).tokenizer
    assert other.chat_template
    with pytest.raises(SystemExit, match="chat_template: needs a tokenizer, and the model has none"):
        template = file(tmp_path, "t.jinja", "{{ messages }}")
        main(["serve", str(directory), "--port", "0", "--chat-template", template])
    with pytest.raises(SystemExit, match=r"tokenizer: .* has none, and texts need one; name one with --tokenizer"):
        main(["complete", "a", "--model", str(directory)])


@pytest.mark.parametrize(
    "head, packages", [(b"\n\x0e\n\x05<unk>", "sentencepiece protobuf"), (b"IQ== 0\n", "tiktoken")]
)
def test_a_tokenizer_that_needs_packages_names_them(head, packages, tmp_path, tiny, monkeypatch):
    monkeypatch.setattr("importlib.metadata.distributions", lambda **_: iter(()))
    (tmp_path / "config.json").write_bytes((tiny / "config.json").read_bytes())
    (tmp_path / "tokenizer.model").write_bytes(head)
    with pytest.raises(SystemExit) as ended:
        main(["serve", str(tmp_path), "--port", "0"])
    assert str(ended.value.code).endswith(
        f"tokenizer.model needs packages that are not installed: pip install {packages}"
    )


def test_a_hub_id_is_checked_before_its_weights_are_downloaded(tiny, monkeypatch):
    asked = []

    def snapshot_download(name, *, revision, allow_patterns, ignore_patterns):
        assert ignore_patterns == ["consolidated*"]
        asked.append((name, revision, "*.safetensors" in allow_patterns))
        return str(tiny)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    with pytest.raises(SystemExit, match="max_model_len"):
        main(["serve", "org/name", "--revision", "v1", "--max-model-len", "1m", "--port", "0"])
    assert asked == [("org/name", "v1", False)]
    monkeypatch.setattr(load, "load_model", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main(["serve", "org/name", "--revision", "v1", "--port", "0"])
    assert asked[1:] == [("org/name", "v1", False), ("org/name", "v1", True)]
