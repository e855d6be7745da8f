"""HTTPS: a certificate, a key of its own, clients that must bring one; and flags that contradict."""

import json
import shlex
import shutil
import ssl
import subprocess
import urllib.error
import urllib.request

import pytest

import server
from benchmarks.shared.server_process import ServerProcess

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="certificates are made with openssl")


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """A self-signed one for 127.0.0.1, and its key."""
    folder = tmp_path_factory.mktemp("tls")
    chain, key = folder / "chain.pem", folder / "key.pem"
    what = "-x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=localhost"
    command = f"openssl req {what} -addext subjectAltName=IP:127.0.0.1 -keyout {key} -out {chain}"
    subprocess.run(shlex.split(command), check=True, capture_output=True)
    return chain, key


def get(url, context):
    with urllib.request.urlopen(url, context=context, timeout=30) as response:
        return json.load(response)


def test_https_with_and_without_a_clients_certificate(certificate):
    chain, key = map(str, certificate)
    flags = ["--ssl-certfile", chain, "--ssl-keyfile", key]
    trusting = ssl.create_default_context(cafile=chain)
    with ServerProcess(*flags, module="tests.serving.scripted") as running:
        assert running.url.startswith("https://")
        assert get(f"{running.url}/v1/models", trusting)["data"][0]["id"] == "demo"
        with pytest.raises(urllib.error.URLError, match="CERTIFICATE_VERIFY_FAILED"):
            get(f"{running.url}/v1/models", ssl.create_default_context())
    with ServerProcess(*flags, "--ssl-ca-certs", chain, module="tests.serving.scripted") as running:
        with pytest.raises((urllib.error.URLError, ConnectionError, ssl.SSLError)):
            get(f"{running.url}/v1/models", trusting)
        trusting.load_cert_chain(chain, key)
        assert get(f"{running.url}/v1/models", trusting)["object"] == "list"


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--ssl-keyfile", "key.pem"], "--ssl-certfile is needed"),
        (["--ssl-certfile", "/no/such.pem"], "No such file"),
        (["--ssl-certfile", __file__], "--ssl-certfile, --ssl-keyfile or --ssl-ca-certs: "),
        (["--api-key-file", "/dev/null"], "--api-key-file: /dev/null holds no key"),
        (["--max-queue", "0"], "max_queue must be at least 1"),
        (["--request-timeout", "0"], "request_timeout must be above 0"),
        (["--access-log", "/no/such/folder/log"], "No such file"),
    ],
)
def test_flags_that_can_not_be_end_with_one_clear_line(flags, words):
    with pytest.raises(SystemExit) as error:
        server.main(["--model", "demo", *flags])
    assert words in str(error.value.code) and "\n" not in str(error.value.code)
