"""The parts of `jpaged serve --ray` that work without Ray."""

import pickle
from pathlib import Path

import pytest
import yaml

from jpaged.cli import serve
from jpaged.cli.main import load, parser
from jpaged.config import EngineConfig
from jpaged.engine.prefix_table import PrefixTable
from jpaged.serving.ray.config import RayConfig
from jpaged.serving.ray.messages import Forwarded, Prefix, merged_metrics, prefix_of
from jpaged.serving.service import ServerConfig

ROOT = Path(__file__).parents[3]


def test_args_of_a_config_file_become_the_configuration():
    config = RayConfig.from_args(
        {"engine": {"max_num_seqs": 4}, "server": {"api_keys": ["a"]}, "replicas": "1:4", "served_model_name": "m"}
    )
    assert config == RayConfig(
        engine=EngineConfig(max_num_seqs=4), server=ServerConfig(api_keys=("a",)), min_replicas=1, max_replicas=4,
        served_model_name="m",
    )  # fmt: skip
    assert config.model_name == "m" and RayConfig().model_name == "demo"
    assert RayConfig.from_args({"replicas": 3}) == RayConfig(min_replicas=3, max_replicas=3)
    assert pickle.loads(pickle.dumps(config)) == config


@pytest.mark.parametrize(
    "args, message",
    [
        ({"replica": 2}, "replica: is not a known field"),
        ({"engine": {"model_name": "demo"}}, "engine.model_name: is not a known field"),
        ({"engine": {"max_num_seqs": 0}}, "engine.max_num_seqs: must be at least 1"),
        ({"engine": "demo"}, "engine: must be a mapping, not 'demo'"),
        ({"server": {"max_queue": 0}}, "server.max_queue: must be at least 1"),
        ({"server": {"max_queue": "many"}}, "server: a value has a wrong type"),
        ({"replicas": "2:1"}, "replicas: must be N or MIN:MAX"),
        ({"replicas": 0}, "replicas: must be N or MIN:MAX"),
        ({"replicas": "few"}, "replicas: must be a number, or MIN:MAX, not 'few'"),
        ({"replicas": 2, "min_replicas": 1}, "replicas: can't be combined with min_replicas"),
        ({"router": "random"}, "router: must be one of prefix, default, not 'random'"),
        ({"num_cpus": -1}, "num_cpus: must be at least 0"),
        ({"max_ongoing_requests": 0}, "max_ongoing_requests: must be above 0"),
    ],
)
def test_invalid_args_are_rejected_by_name(args, message):
    with pytest.raises(ValueError, match=message):
        RayConfig.from_args(args)


def test_a_key_of_the_environment_is_added(monkeypatch):
    config = RayConfig(server=ServerConfig(api_keys=("a",)))
    monkeypatch.delenv(serve.API_KEY_VARIABLE, raising=False)
    assert config.with_key_of_environment() == config
    monkeypatch.setenv(serve.API_KEY_VARIABLE, "b")
    assert config.with_key_of_environment().server.api_keys == ("a", "b")


def test_the_deployed_config_file_is_valid():
    (application,) = yaml.safe_load((ROOT / "deploy" / "ray-serve.yaml").read_text())["applications"]
    assert application["import_path"] == "jpaged.serving.ray:app"
    config = RayConfig.from_args(application["args"])
    assert (config.min_replicas, config.max_replicas) == (1, 4)


def test_a_forwarded_request_leaves_its_prefix_behind():
    forwarded = Forwarded("/tokenize", b"{}", "key 1", Prefix("a", ""))
    sent = pickle.loads(pickle.dumps(forwarded))
    assert (sent.path, sent.body, sent.client, sent.prefix) == ("/tokenize", b"{}", "key 1", None)


@pytest.mark.parametrize(
    "body, expected",
    [
        (b'{"prompt": "a dog", "max_tokens": 3}', Prefix("a dog", "")),
        (b'{"prompt": ["a dog", "a cat"], "cache_salt": "s"}', Prefix("a dog", "s")),
        (b'{"prompt": [1, 2, 3]}', Prefix([1, 2, 3], "")),
        (b'{"prompt": [[1, 2], [3]]}', Prefix([1, 2], "")),
        (b'{"messages": [{"role": "user", "content": "hi"}]}', Prefix(b'[null,[{"role":"user","content":"hi"}]]', "")),
        (b'{"prompt": {"a": 1}}', None),
        (b'{"prompt": [1, "a"]}', None),
        (b'{"prompt": "a", "cache_salt": []}', Prefix("a", "")),
        (b"[]", None),
        (b"{", None),
        (b"\xff", None),
        (b"{}", None),
    ],
)
def test_prefix_of_a_body(body, expected):
    assert prefix_of(body) == expected


def test_turns_of_a_conversation_have_a_common_prefix():
    table, turn = PrefixTable(step=16), b'{"role": "user", "content": "Tell me a long story about a dog."}'
    first, second = prefix_of(b'{"messages": [%b]}' % turn), prefix_of(b'{"n": 1, "messages": [%b, %b]}' % (turn, turn))
    table.remember(first.prompt, "b")
    assert table.choose(second.prompt, {"a": 0, "b": 0}) == "b"


def test_metrics_of_replicas_are_merged_with_their_ids():
    text = "# HELP vllm:prompt_tokens_total Tokens\n# TYPE vllm:prompt_tokens_total counter\n"
    texts = {
        name: f'{text}vllm:prompt_tokens_total{{model_name="m"}} {count}\n' for name, count in (("a", 1), ("b", 2))
    }
    merged = merged_metrics(texts).decode().splitlines()
    assert merged == [
        "# HELP vllm:prompt_tokens_total Tokens",
        "# TYPE vllm:prompt_tokens_total counter",
        'vllm:prompt_tokens_total{model_name="m",replica="a"} 1.0',
        'vllm:prompt_tokens_total{model_name="m",replica="b"} 2.0',
    ]


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--replicas", "2"], "--replicas: needs --ray"),
        (["--ray", "--uds", "socket"], "--uds: can't be combined with --ray"),
        (["--ray", "--access-log", "none"], "--access-log: can't be combined with --ray"),
        (["--ray", "--log-level", "debug"], "--log-level: can't be combined with --ray"),
        (
            ["--ray", "--ssl-certfile", __file__, "--ssl-ca-certs", __file__],
            "--ssl-ca-certs: can't be combined with --ray",
        ),
        (["--ray", "--port", "0"], "--port: must be a port, not 0, with --ray"),
        (["--ray", "--replicas", "x"], "replicas: must be a number"),
    ],
)
def test_flags_that_ray_serve_can_not_apply_are_rejected(flags, message):
    with pytest.raises(ValueError, match=message):
        serve.run(parser("serve", load("serve"), "jpaged serve").parse_args(flags))


def test_without_ray_the_extra_is_named(monkeypatch):
    monkeypatch.setattr(serve.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"--ray: Ray is not installed: pip install 'jpaged\[ray\]'"):
        serve.run(parser("serve", load("serve"), "jpaged serve").parse_args(["--ray"]))
