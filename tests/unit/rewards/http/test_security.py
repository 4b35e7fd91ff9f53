"""Where requests may go, what they may carry, and that the token stays where it belongs."""

import asyncio
import datetime
import ipaddress
import json
import logging
import socket
import ssl

import pytest
from pydantic import ValidationError

from rlhf_ray.config.load import as_yaml
from rlhf_ray.config.rewards import HTTPReward
from rlhf_ray.errors import ConfigError, RewardError
from rlhf_ray.rewards.http.allowed_addresses import ForbiddenAddressError, refusal, resolve
from rlhf_ray.rewards.http.source import HTTPSource
from tests.unit.rewards.http.conftest import requests_of, source_of
from tests.unit.rewards.http.fault_server import faulty

CANARY = "canary-0123456789abcdef"


def reward(url, **settings):
    return HTTPReward.model_validate({"type": "http", "urls": [url], **settings})


class TestURLs:
    @pytest.mark.parametrize("url", ["https://scorer.example", "https://scorer.example:8008/v1/", "http://127.0.0.1:1",
                                     "http://localhost:8008", "http://[::1]:8008", "https://10.0.0.7:8008"])
    def test_permitted(self, url):
        assert reward(url).urls == [url]

    @pytest.mark.parametrize(("url", "words"), [
        ("http://scorer.example", "is plain http"), ("http://10.0.0.7:8008", "is plain http"),
        ("ftp://scorer.example", "is not an http or https URL"), ("scorer:8008", "is not an http or https URL"),
        ("https://", "is not an http or https URL"), ("https://scorer:99999", "is not a URL"),
        (f"https://me:{CANARY}@scorer", "contains a user name"), ("https://scorer/?a=1", "has a query"),
        ("https://a scorer", "contains white space"), ("https://scorer\t.example", "contains white space"),
    ])
    def test_refused(self, url, words):
        with pytest.raises(ValidationError, match=words) as caught:
            reward(url)
        assert CANARY not in caught.value.errors()[0]["msg"]

    def test_plain_http_to_a_host_on_the_list(self):
        assert reward("http://scorer.lan:8008", allow_hosts=["Scorer.lan"])

    def test_an_address_twice(self):
        with pytest.raises(ValidationError, match="is given twice"):
            HTTPReward.model_validate({"type": "http", "urls": ["https://a", "https://a"]})


class TestAddresses:
    @pytest.mark.parametrize("address", [
        "169.254.169.254", "169.254.170.2", "fd00:ec2::254", "fe80::1", "100.100.100.200", "192.0.0.192",
        "::ffff:169.254.169.254", "64:ff9b::a9fe:a9fe", "2002:a9fe:a9fe::1", "fd20:ce::254", "0.0.0.0", "::",
        "224.0.0.1", "255.255.255.255", "168.63.129.16",
    ])
    def test_never_asked_whatever_is_allowed(self, address):
        assert refusal(ipaddress.ip_address(address), allowed=True, local_by_name=True)

    @pytest.mark.parametrize("address", ["10.1.2.3", "172.16.0.1", "192.168.1.1", "100.64.0.1", "fd12::1",
                                         "::ffff:10.1.2.3", "127.0.0.1", "::1"])
    def test_private_ones_only_from_the_list(self, address):
        address = ipaddress.ip_address(address)
        assert "allow_hosts" in refusal(address, allowed=False, local_by_name=False)
        assert refusal(address, allowed=True, local_by_name=False) is None

    @pytest.mark.parametrize("address", ["93.184.215.14", "2606:2800:220:1::1"])
    def test_public_ones(self, address):
        assert refusal(ipaddress.ip_address(address), allowed=False, local_by_name=False) is None

    def test_this_machine_by_its_own_name_only(self):
        assert refusal(ipaddress.ip_address("127.0.0.1"), allowed=False, local_by_name=True) is None

    def test_an_address_that_cannot_be_reached_gives_way_to_the_next_and_is_not_tried_again(self, monkeypatch):
        """localhost is often ::1 and 127.0.0.1, of which a service listens on one."""
        answer_names(monkeypatch, ["127.0.0.2", "127.0.0.1"])

        async def run():
            async with (faulty() as server,
                        source_of(f"http://localhost:{server.port}", batch_size=1) as source):
                return [await source.score(requests_of(3)) for _ in range(2)]

        answers = asyncio.run(run())
        assert [answer.scores.tolist() for answer in answers] == [[0, 1, 2]] * 2
        assert [answer.failures for answer in answers] == [0, 0], "found at the start, and kept to"

    def test_one_forbidden_address_among_others_forbids_the_name(self, monkeypatch):
        answer_names(monkeypatch, ["93.184.215.14", "169.254.169.254"])
        with pytest.raises(ForbiddenAddressError, match=r"scorer\.lan resolves to 169\.254\.169\.254"):
            asyncio.run(resolve("scorer.lan", 80, ["scorer.lan"]))

    def test_a_forbidden_address_ends_the_run_at_once(self, monkeypatch):
        answer_names(monkeypatch, ["169.254.169.254"])

        async def run():
            async with source_of("https://scorer.example"):
                pass

        with pytest.raises(RewardError, match="a link-local or metadata address, which is never allowed"):
            asyncio.run(run())


def answer_names(monkeypatch, *rounds):
    """Names resolve to these addresses, one round after another, the last for ever."""
    left, resolved = list(rounds), []

    def getaddrinfo(host, port, *_, **__):
        addresses = left.pop(0) if len(left) > 1 else left[0]
        resolved.append((host, addresses))
        return [(socket.AF_INET6 if ":" in a else socket.AF_INET, socket.SOCK_STREAM, 6, "", (a, port))
                for a in addresses]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    return resolved


def test_connections_go_to_the_address_that_was_checked(monkeypatch):
    """A name that is judged at one address and connected to at another would pass the check (DNS rebinding)."""
    resolved = answer_names(monkeypatch, ["127.0.0.1"])

    async def run():
        async with faulty() as server:
            url = f"http://scorer.lan:{server.port}"
            async with source_of(url, allow_hosts=["scorer.lan"]) as source:
                await source.score(requests_of(1))
            return server.asked, server.connections

    asked, connections = asyncio.run(run())
    # Once for each request; connecting resolves no name again, only the address itself.
    assert [host for host, _ in resolved if host == "scorer.lan"] == ["scorer.lan"] * 2
    assert {host for host, _ in resolved} <= {"scorer.lan", "127.0.0.1"} and connections >= 1
    assert asked[0].headers["host"].startswith("scorer.lan:")


def test_a_name_that_changes_to_a_forbidden_address_is_not_followed(monkeypatch):
    answer_names(monkeypatch, ["127.0.0.1"], ["169.254.169.254"])

    async def run():
        async with faulty() as server:
            async with source_of(f"http://scorer.lan:{server.port}", allow_hosts=["scorer.lan"]) as source:
                with pytest.raises(RewardError, match=r"169\.254\.169\.254"):
                    await source.score(requests_of(1))
            return server.asked

    assert asyncio.run(run()) == []


def test_proxies_of_the_environment_are_not_used(monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:1")

    async def run():
        async with faulty() as server, source_of(server.url) as source:
            return (await source.score(requests_of(1))).scores.tolist()

    assert asyncio.run(run()) == [0]


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    """(certificate, key) files of one that signed itself, for scorer.lan."""
    return make_certificate(tmp_path_factory.mktemp("tls"), "scorer.lan")


class TestCertificates:
    def run(self, authority, host, monkeypatch, **settings):
        answer_names(monkeypatch, ["127.0.0.1"])
        tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        tls.load_cert_chain(*authority)

        async def run():
            async with faulty(tls=tls) as server:
                url = f"https://{host}:{server.port}"
                async with source_of(url, allow_hosts=[host], **settings) as source:
                    return (await source.score(requests_of(2))).scores.tolist()

        return asyncio.run(run())

    def test_a_trusted_one_for_the_name(self, authority, monkeypatch):
        assert self.run(authority, "scorer.lan", monkeypatch, ca_file=str(authority[0])) == [0, 1]

    def test_an_unknown_authority(self, authority, monkeypatch):
        with pytest.raises(RewardError, match="CERTIFICATE_VERIFY_FAILED"):
            self.run(authority, "scorer.lan", monkeypatch)

    def test_another_name(self, authority, monkeypatch):
        with pytest.raises(RewardError, match=r"CERTIFICATE_VERIFY_FAILED.*Hostname mismatch"):
            self.run(authority, "other.lan", monkeypatch, ca_file=str(authority[0]))

    def test_files_without_certificates(self, tmp_path):
        (tmp_path / "empty.pem").write_text("nothing")
        for name, words in (("none.pem", "no such file"), ("empty.pem", "contains no certificates")):
            with pytest.raises(ConfigError, match=words):
                asyncio.run(HTTPSource("q", reward("https://a", ca_file=str(tmp_path / name))).start())


def make_certificate(directory, name):
    """(certificate, key) files of a self-signed certificate for a name."""
    x509 = pytest.importorskip("cryptography.x509")
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.datetime.now(datetime.UTC)
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    certificate = (
        x509.CertificateBuilder().subject_name(subject).issuer_name(subject).public_key(key.public_key())
        .serial_number(1).not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    files = directory / "certificate.pem", directory / "key.pem"
    files[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    files[1].write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8,
                                           serialization.NoEncryption()))
    return files


class TestToken:
    @pytest.fixture(params=["file", "variable"])
    def where(self, request, tmp_path, monkeypatch):
        if request.param == "file":
            (tmp_path / "token").write_text(CANARY + "\n")
            return {"token_file": str(tmp_path / "token")}
        monkeypatch.setenv("SCORER_TOKEN", CANARY)
        return {"token_variable": "SCORER_TOKEN"}

    def test_it_is_carried_by_every_request(self, where):
        async def run():
            async with faulty() as server, source_of(server.url, **where) as source:
                await source.score(requests_of(2))
                return server.asked

        assert [a.headers["authorization"] for a in asyncio.run(run())] == [f"Bearer {CANARY}"]

    def test_it_is_in_no_log_error_or_configuration(self, where, caplog, capfd, tmp_path):
        """The server repeats the header in its answer, which an error quotes; every logger is turned to its most."""
        errors = []

        async def run():
            for behaviours in (["echo"], ["html", "reset", "500"] * 3):
                async with faulty(behaviours) as server, source_of(server.url, retries=2, **where) as source:
                    with pytest.raises(RewardError) as caught:
                        await source.score(requests_of(2))
                    errors.append(caught.value)
                    errors.append(repr(vars(source)))

        with caplog.at_level(logging.DEBUG):
            for name in ("httpx", "httpcore", "asyncio"):
                logging.getLogger(name).setLevel(logging.DEBUG)
            asyncio.run(run())
        assert "you sent Bearer ***" in str(errors[0])
        config = HTTPReward.model_validate({"type": "http", "urls": ["https://a"], **where})
        everything = [caplog.text, *capfd.readouterr(), *map(str, errors), *map(repr, errors),
                      as_yaml(config), repr(config), json.dumps(config.model_dump())]
        assert caplog.text and not [text for text in everything if CANARY in text]

    @pytest.mark.parametrize(("content", "words"), [
        (None, "cannot be read"), ("", "is empty"), ("two words", "is not a token"), ("tök", "not ASCII")])
    def test_a_file_without_one(self, content, words, tmp_path):
        if content is not None:
            (tmp_path / "token").write_text(content)
        source = HTTPSource("q", reward("https://a", token_file=str(tmp_path / "token")))
        with pytest.raises(ConfigError, match=rf"rewards\.q\.token_file=.*{words}"):
            asyncio.run(source.start())

    def test_a_variable_without_one(self, monkeypatch):
        monkeypatch.delenv("NO_SUCH_TOKEN", raising=False)
        source = HTTPSource("q", reward("https://a", token_variable="NO_SUCH_TOKEN"))
        with pytest.raises(ConfigError, match=r"rewards\.q\.token_variable='NO_SUCH_TOKEN' is empty"):
            asyncio.run(source.start())

    def test_two_places(self):
        with pytest.raises(ValidationError, match="keep one"):
            reward("https://a", token_file="f", token_variable="V")
