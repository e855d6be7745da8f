"""HTTPS, with and without certificates of clients."""

import json
import shlex
import shutil
import ssl
import subprocess
import urllib.error
import urllib.request

import pytest

from benchmarks.shared.server_process import ServerProcess
from tests.support.patience import PATIENCE_S

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="certificates are made with openssl")


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """A self-signed certificate for 127.0.0.1, and its key."""
    folder = tmp_path_factory.mktemp("tls")
    chain, key = folder / "chain.pem", folder / "key.pem"
    what = "-x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=localhost"
    command = f"openssl req {what} -addext subjectAltName=IP:127.0.0.1 -keyout {key} -out {chain}"
    subprocess.run(shlex.split(command), check=True, capture_output=True)
    return chain, key


def get(url, context):
    with urllib.request.urlopen(url, context=context, timeout=PATIENCE_S) as response:
        return json.load(response)


def test_https_requires_a_client_certificate_only_with_ca_certs(certificate):
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
