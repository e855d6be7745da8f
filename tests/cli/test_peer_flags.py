"""Flags of vLLM and SGLang on the command line and as keywords of `LLM`: each is applied, needless or unsupported."""

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path

import pytest

from jpaged import llm as offline
from jpaged.cli.bench_serve import PEERS as BENCH
from jpaged.cli.main import load, main, parser
from jpaged.config import EngineConfig
from jpaged.flags import ENGINE, as_text, parsed
from jpaged.setting import kind, settings

FIXTURES = Path(__file__).parents[1] / "fixtures" / "peer_flags"
PARSER = parser("serve", load("serve"), "jpaged serve")
OWN = PARSER._option_string_actions
DEFAULTS = vars(PARSER.parse_args([]))
SERVERS = "a setting of jpaged serve, not of an engine"
ENGINE_FIELDS = {each.name for each in fields(EngineConfig)}


def lines(name):
    return [line for line in (FIXTURES / name).read_text().splitlines() if not line.startswith("#")]


PEERS = sorted({*" ".join(lines("vllm.txt")).split(), *" ".join(lines("sglang.txt")).split()})
COMMON = [line.split(" ", 1) for line in lines("common.txt")]


class Loading(Exception):
    """Raised in place of loading, with the config."""


@pytest.fixture
def stop_before_loading(monkeypatch):
    def load_engine(config, **_):
        raise Loading(config)

    monkeypatch.setattr(offline, "load_engine", load_engine)


def on_command_line(capsys, *words):
    """The effect of a command line: ("refused", reason), ("needless", notices) or ("applied", settings)."""
    try:
        args = vars(PARSER.parse_args(words))
    except SystemExit as ended:
        said = capsys.readouterr().err.removeprefix("jpaged serve: error: ").removeprefix("argument ")
        assert ended.code == 2 and said.count("\n") == 1
        return ("unknown" if said.startswith("unknown flag") else "refused"), said.partition(": ")[2].strip()
    if args["notices"]:
        return "needless", [notice.partition(": ")[2] for notice in args["notices"]]
    changed = {name: value for name, value in args.items() if value != DEFAULTS[name]}
    return "applied", changed if changed.keys() <= ENGINE_FIELDS else "a server's"


def in_python(caplog, name, value):
    """The effect of a keyword of `LLM`, in the same form."""
    caplog.clear()
    with pytest.raises((Loading, ValueError)) as raised:
        offline.LLM(**{name: value})
    if not isinstance(raised.value, Loading):
        keyword, _, reason = str(raised.value).partition(": ")
        assert keyword == name
        return ("applied", "a server's") if reason == SERVERS else ("refused", reason)
    if caplog.messages:
        return "needless", [message.partition(": ")[2] for message in caplog.messages]
    given = {each.name: (getattr(raised.value.args[0], each.name), each.default) for each in fields(EngineConfig)}
    return "applied", {name: value for name, (value, default) in given.items() if value != default}


JSON = {"speculative_config": '{"num_speculative_tokens": 2}', "kv_events_config": '{"topic": "x"}'}


def sample(name):
    """A value of a flag that is not its default; True for a switch."""
    flag = ENGINE.find(name)
    if flag and not flag.ours:
        return {0: True, 1: "x", "+": "1", "?": "x"}[flag.nargs]
    if flag and isinstance(flag.convert, Mapping):
        return next(iter(flag.convert)) if flag.nargs else True
    action = OWN[flag.ours if flag else name]
    if action.dest in JSON:
        return JSON[action.dest]
    for each, setting in settings(EngineConfig):
        if each.name == action.dest and action.nargs != 0:
            other = next((one for one in setting.choices or () if one != each.default), None)
            return other or {int: "16", float: "0.5", str: "x", Mapping: '{"a": {"b": 1}}'}[kind(each)[0]]
    return True if action.nargs == 0 else "2"


def given_as_flag(capsys, name):
    value = sample(name)
    return on_command_line(capsys, name if value is True else f"{name}={value}")


def test_every_flag_of_vllm_and_sglang_is_in_exactly_one_class(capsys):
    for name in PEERS:
        flags, found = ENGINE.matches(name), given_as_flag(capsys, name)
        assert len(flags) <= 1 and (flags or name in OWN), name
        if name in OWN:
            continue
        (flag,) = flags
        assert bool(flag.ours) + bool(flag.reason or flag.refusal) == 1, name
        if flag.ours:
            assert found[0] == "applied" and flag.ours in OWN, name
        else:
            harmless = flag.harmless is None or as_text(sample(name)) in flag.harmless
            assert found == (("needless", [flag.reason]) if harmless else ("refused", flag.refusal)), name
    assert given_as_flag(capsys, "--model-path") == ("applied", {"model": "x"})


def test_every_flag_of_vllm_bench_is_in_exactly_one_class(capsys):
    made = parser("bench serve", load("bench serve"), "jpaged bench serve")
    for name in " ".join(lines("vllm_bench.txt")).split():
        flags = BENCH.matches(name)
        if not flags:
            assert name in made.flags, name
            continue
        (flag,) = flags
        assert bool(flag.ours) + bool(flag.reason) == 1 and (not flag.ours or flag.ours in made.flags), name
        if not flag.ours and flag.harmless is not None:
            with pytest.raises(SystemExit):
                made.parse_args([f"{name}=x"])
            assert capsys.readouterr().err.endswith(f"{name} x: {flag.refusal}\n")


def test_every_harmless_value_is_accepted_with_a_notice(capsys):
    for name in ENGINE.names - OWN.keys():
        flag = ENGINE.find(name)
        for value in flag.harmless or ():
            assert on_command_line(capsys, f"{name}={value}") == ("needless", [flag.reason]), (name, value)


def test_llm_does_what_the_command_line_does_for_every_flag(capsys, caplog, stop_before_loading):
    for name in PEERS:
        keyword = name.removeprefix("--").replace("-", "_")
        if not name.startswith("--") or keyword in ("model", "tokenizer"):
            continue  # the arguments of LLM
        if name in OWN and keyword not in ENGINE_FIELDS:
            if not ENGINE.find(name) or OWN[name].nargs == 0:
                with pytest.raises(TypeError, match=rf"^{keyword}: not a setting of an engine"):
                    offline.LLM(**{keyword: sample(name)})
            continue
        assert in_python(caplog, keyword, parsed(sample(name))) == given_as_flag(capsys, name), name


@pytest.mark.parametrize("words", COMMON, ids=" ".join)
def test_flags_of_public_commands_are_in_one_of_the_classes(words, capsys):
    kind, told = on_command_line(capsys, *words)
    assert kind in ("applied", "needless", "refused") and told is not None
    flag = ENGINE.find(words[0].partition("=")[0])
    if flag and flag.harmless is None:
        assert kind == "needless"


@pytest.mark.parametrize(
    "words, changed",
    [
        ("--max-model-len auto --block-size auto --gpu-memory-utilization 0.5", {"gpu_memory_utilization": 0.5}),
        ("--max-model-len=-1", {}),
        ("--log-level DEBUG --shutdown-timeout 3 --max-queued-requests 5 --disable-uvicorn-access-log", "a server's"),
        ("--kv-cache-memory-bytes 1G", {"kv_cache_memory_bytes": 2**30}),
        ("--enable-prefix-caching=false", {"enable_prefix_caching": False}),
        ("--enable-prefix-caching=True --skip-tokenizer-init=false --no-skip-tokenizer-init", {}),
        ("--disable_radix_cache --no-disable-overlap-schedule", {"enable_prefix_caching": False}),
        ("--tp 2 --mem-fraction-static .5", {"tensor_parallel_size": 2, "gpu_memory_utilization": 0.5}),
        ("-q awq_marlin --load-format runai_streamer", {"quantization": "awq", "load_format": "safetensors"}),
        ("--hf-overrides.text_config.a 1 --hf_overrides.text_config.b x --rope-theta 5",
         {"hf_overrides": {"text_config": {"a": 1, "b": "x"}, "rope_theta": 5}}),
        ('--rope-scaling.rope_type yarn --rope-scaling {"factor":4}',
         {"hf_overrides": {"rope_scaling": {"rope_type": "yarn", "factor": 4}}}),
        ("--override-generation-config.temperature=0.6", {"override_generation_config": {"temperature": 0.6}}),
    ],
)  # fmt: skip
def test_values_are_converted_and_objects_are_merged(words, changed, capsys):
    assert on_command_line(capsys, *words.split(" ")) == ("applied", changed)


@pytest.mark.parametrize(
    "words, notices",
    [
        ("-cc.mode=3 -O2 -O 3", ["-cc.mode", "-O", "-O"]),
        ("--compilation-config.mode 3 --cudagraph-capture-sizes 1 2 4", ["--compilation-config.mode",
                                                                         "--cudagraph-capture-sizes"]),
        ('--structured-outputs-config {"backend":"xgrammar","disable_any_whitespace":false}',
         ["--structured-outputs-config"] * 2),
        ('--limit-mm-per-prompt {"image":0,"video":0} --limit-mm-per-prompt.audio 0',
         ["--limit-mm-per-prompt", "--limit-mm-per-prompt", "--limit-mm-per-prompt.audio"]),
        ("--no-enable-eplb --enforce-eager", ["--enable-eplb", "--enforce-eager"]),
    ],
)  # fmt: skip
def test_notices_name_the_flags_and_their_fields(words, notices):
    args = PARSER.parse_args(["model", *words.split(" "), "--port", "1"])
    assert [notice.partition(": ")[0] for notice in args.notices] == notices
    assert (args.model, args.port) == ("model", 1)


@pytest.mark.parametrize(
    "words, said",
    [
        ('--structured-outputs-config {"backend":"auto","disable_any_whitespace":true}',
         "--structured-outputs-config {\"backend\":\"auto\",\"disable_any_whitespace\":true}: send the options of"),
        ('--limit-mm-per-prompt {"image":0,"video":1}', "only text inputs are supported"),
        ("--kv-transfer-config.kv_role kv_both", "--kv-transfer-config.kv_role kv_both: transfer of KV blocks"),
        ("--enable-chunked-prefill=false", "--enable-chunked-prefill false: long prompts are always computed in"),
        ("--no-enable-chunked-prefill", "--enable-chunked-prefill: long prompts are always computed in chunks"),
        ("--hf-overrides [1]", "argument --hf-overrides: must be a JSON object, not [1]"),
        ("--attention-backend", "argument --attention-backend: expected one argument"),
        ("--attention-backend --port 1", "argument --attention-backend: expected one argument"),
        ("--enable-lorq", "unknown flag --enable-lorq; did you mean --enable-lora?"),
    ],
)  # fmt: skip
def test_refusals_name_the_flag_and_the_reason(words, said, capsys):
    with pytest.raises(SystemExit) as ended:
        PARSER.parse_args(words.split(" "))
    assert ended.value.code == 2 and said in capsys.readouterr().err


def test_keys_of_a_config_file_may_be_those_of_vllm(tmp_path, capsys):
    path = tmp_path / "serve.yaml"
    path.write_text(
        "context-length: 32k\nenforce-eager: true\ncudagraph_capture_sizes: [1, 2]\nrope-scaling: {rope_type: yarn}\n"
        "hf-overrides: {rope_theta: 5}\nspeculative-config: null\ndisable-radix-cache: false\n"
    )
    args = PARSER.parse_args(["--config", str(path), "--tp", "2"])
    assert (args.max_model_len, args.tensor_parallel_size, args.enable_prefix_caching) == (32000, 2, True)
    assert args.hf_overrides == {"rope_scaling": {"rope_type": "yarn"}, "rope_theta": 5} and len(args.notices) == 2
    path.write_text("fully-sharded-loras: true\n")
    with pytest.raises(SystemExit):
        PARSER.parse_args(["--config", str(path)])
    assert "--fully-sharded-loras true: adapters run in slots on one device" in capsys.readouterr().err


def test_notices_are_printed(monkeypatch, capsys):
    monkeypatch.setattr(load("serve"), "run", lambda args: None)
    main(["serve", "--trust-remote-code", "--pipeline-parallel-size", "1"])
    assert capsys.readouterr().err.splitlines() == [
        "jpaged serve: --trust-remote-code: not needed, no model brings code of its own",
        "jpaged serve: --pipeline-parallel-size: the default",
    ]


@pytest.mark.parametrize(
    "keywords, changed",
    [
        (dict(trust_remote_code=True, enforce_eager=True, seed=None, speculative_config=None), {}),
        (dict(max_model_len="auto", max_num_seqs=4, max_num_batched_tokens=256),
         {"max_num_seqs": 4, "max_num_batched_tokens": 256}),
        (dict(rope_scaling={"factor": 2}, hf_overrides={"rope_theta": 5}),
         {"hf_overrides": {"rope_scaling": {"factor": 2}, "rope_theta": 5}}),
        (dict(model_path="x", limit_mm_per_prompt={"image": 0}, compilation_config={"mode": 3}, data_parallel_size=1),
         {"model": "x"}),
    ],
)  # fmt: skip
def test_llm_takes_the_keywords_of_vllm_and_sglang(keywords, changed, stop_before_loading):
    with pytest.raises(Loading) as raised:
        offline.LLM(**keywords)
    assert raised.value.args == (EngineConfig(**changed),)


@pytest.mark.parametrize(
    "keywords, error, said",
    [
        (dict(fully_sharded_loras=True), ValueError, "fully_sharded_loras: adapters run in slots on one device"),
        (dict(limit_mm_per_prompt={"image": 1}), ValueError, "limit_mm_per_prompt: only text inputs are supported"),
        (dict(shutdown_timeout=3), ValueError, "shutdown_timeout: a setting of jpaged serve, not of an engine"),
        (dict(host="0.0.0.0"), TypeError, "host: not a setting of an engine, whose settings are those of EngineConfig"),
        (dict(max_num_seq=3), TypeError, "EngineConfig; did you mean max_num_seqs?"),
    ],
)
def test_llm_refuses_keywords_by_name(keywords, error, said, stop_before_loading):
    with pytest.raises(error) as raised:
        offline.LLM(**keywords)
    assert said in str(raised.value)
