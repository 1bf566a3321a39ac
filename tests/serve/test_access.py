"""Tokens have roles and tenants, names and pages are known or refused, and tokens are read again."""

import asyncio
import json
import signal
import ssl
import subprocess

import httpx2 as httpx
import pytest
from digit_service import folder, in_base64, pixels, png, served_model
from fastapi.testclient import TestClient
from processes import service
from waiting import wait_until

from alight.errors import BadFile, BadInput
from alight.serve.access import Access, Caller, TenantCaps, Tokens, allowed_hosts
from alight.serve.app import build_app
from alight.serve.hosting import ModelHost
from alight.serve.requests import Limits, RequestRefused

NAMES = {role: f"a-token-of-role-{role}" for role in ("predict", "metrics", "admin")}
IMAGES = {"images": [in_base64(pixels(1)[0])]}


def bearer(token):
    return {"Authorization": f"Bearer {token}"}


def token_file(path, tenants=None, **tokens):
    entries = [{"token": token, "role": role} for role, token in (NAMES | tokens).items()]
    path.write_text(json.dumps({"tokens": entries, "tenants": tenants or {}}))
    return path


@pytest.fixture
def host():
    return ModelHost.of(served_model("expensive", "cheap"), Limits())


def test_each_role_may_do_what_it_is_for(host, tmp_path):
    tokens = Tokens.load(token_file(tmp_path / "tokens.json"))
    allowed = {
        "predict": ["POST /predict", "GET /status", "GET /budget", "GET /v2/models/model"],
        "metrics": ["GET /metrics", "GET /status", "GET /budget", "GET /v2/models/model"],
    }
    requests = [*allowed["predict"], "GET /metrics", "PUT /budget", "POST /v2/repository/index"]
    with TestClient(build_app(host, Access(tokens))) as client:
        for role, token in NAMES.items():
            for line in requests:
                method, path = line.split()
                body = {"policy": "cheap"} if method == "PUT" else IMAGES
                reply = client.request(method, path, headers=bearer(token), json=None if method == "GET" else body)
                may = role == "admin" or line in allowed[role]
                assert reply.status_code == (200 if may else 403), (role, line)
        assert client.get("/status", headers=bearer("unknown")).status_code == 401
        assert client.get("/healthz").status_code == 200


def test_a_file_of_tokens_that_makes_no_sense_is_refused(tmp_path):
    path = tmp_path / "tokens.json"
    for content, error, message in (
        ({"tokens": [{"token": "short", "role": "admin"}]}, BadInput, "16 or more"),
        ({"tokens": [{"token": "a" * 16, "role": "king"}]}, BadInput, "a role 'king': give one of predict"),
        ({"tokens": [{"token": "a" * 16, "role": "predict", "tenant": "x"}]}, BadInput, "no cap for tenant 'x'"),
        ({"tokens": [{"token": "a" * 16, "role": "admin"}] * 2}, BadFile, "of 2 tokens 1 differ"),
        ({"tokens": [{"token": "a" * 16}]}, BadFile, "it does not list tokens"),
        ({"tokens": [], "more": 1}, BadFile, "unknown more"),
        ([{"token": "a" * 16, "role": "admin"}], BadFile, "it does not list tokens"),
        ("[" * 100_000, BadFile, "it does not list tokens"),
        ("\0" * 16, BadInput, "a token of 16 characters: give 16 or more of ASCII"),
        ({"tokens": [], "tenants": {"*": None}}, BadInput, "a tenant '\\*', which stands for all"),
        ({"tokens": [], "tenants": {"shop": -1}}, BadInput, "a cap -1 of tenant 'shop': give '2 PFLOPs'"),
        ({"tokens": [], "tenants": {"shop": float("inf")}}, BadInput, "a cap inf of tenant 'shop'"),
        ({"tokens": [], "tenants": {"shop": True}}, BadInput, "a cap True of tenant 'shop'"),
        ({"tokens": [], "tenants": {"shop": {}}}, BadFile, "it does not list tokens"),
    ):
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        with pytest.raises(error, match=message):
            Tokens.load(path)


def test_requests_to_an_unknown_name_and_from_other_pages_are_refused(host):
    access = Access(hosts=allowed_hosts("127.0.0.1", [], False), origins=("https://friend.org",))
    with TestClient(build_app(host, access), base_url="http://localhost:8000") as client:
        assert client.post("/predict", json=IMAGES).status_code == 200
        rebound = {"Host": "evil.org:8000"}
        assert client.put("/budget", json={"policy": "cheap"}, headers=rebound).status_code == 403
        assert client.get("/healthz", headers={"Host": "10.0.0.7:8000"}).status_code == 200  # a probe, by address
        own, friend = {"Origin": "http://localhost:8000"}, {"Origin": "https://friend.org"}
        assert [client.post("/predict", json=IMAGES, headers=each).status_code for each in (own, friend)] == [200, 200]
        for origin in ("https://evil.org", "null", "http://localhost:9000"):
            reply = client.post("/predict", json=IMAGES, headers={"Origin": origin})
            assert reply.status_code == 403
            assert "allow them with --allowed-origins" in reply.json()["error"]


def test_a_page_that_is_allowed_may_send_json_with_a_token_and_read_the_answer(host):
    access = Access(Tokens.of("a-long-random-text"), origins=("https://friend.org",))
    with TestClient(build_app(host, access), base_url="http://localhost:8000") as client:
        asked = "authorization,content-type"
        first = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": asked}
        for origin, status in (("https://friend.org", 200), ("https://evil.org", 400)):
            reply = client.options("/predict", headers=first | {"Origin": origin})  # as browsers ask before they send
            assert reply.status_code == status
            assert reply.headers.get("Access-Control-Allow-Origin", "https://friend.org") == "https://friend.org"
            assert ("Access-Control-Allow-Origin" in reply.headers) is (status == 200)
        friend = {"Origin": "https://friend.org"}
        for headers, status in ((bearer("a-long-random-text"), 200), ({}, 401)):
            reply = client.post("/predict", json=IMAGES, headers=friend | headers)
            assert reply.status_code == status
            assert reply.headers["Access-Control-Allow-Origin"] == "https://friend.org"


def test_a_service_for_everybody_needs_tokens_or_names():
    assert allowed_hosts("0.0.0.0", [], has_tokens=True) == ()
    assert "a.org" in allowed_hosts("0.0.0.0", ["A.org"], has_tokens=False)
    assert allowed_hosts("0.0.0.0", ["*"], has_tokens=False) == ()
    assert allowed_hosts("10.0.0.7", [], has_tokens=False)[-1] == "10.0.0.7"
    with pytest.raises(BadInput, match="without tokens on all addresses"):
        allowed_hosts("0.0.0.0", [], has_tokens=False)


def test_an_origin_that_is_not_a_url_is_refused():
    for origin in (
        "http://[",
        "http://[::1",
        "null",
        "localhost",
        "http://localhost.evil.org",
        "http://evil@localhost",
    ):
        with pytest.raises(RequestRefused, match="may not call this service"):
            Access().check("GET", "/status", {"host": "localhost", "origin": origin})
    assert Access().check("GET", "/status", {"host": "[::1]:80", "origin": "http://[::1]:80"}).role == "admin"


def test_requests_that_are_not_decided_cost_a_tenant_nothing():
    model = served_model("expensive")
    last, limits = model.policies["expensive"].costs[-1], Limits()
    host = ModelHost(ModelHost.of(model, limits).sources, limits, caps=lambda: {"*": 10 * last})
    damaged = png(pixels(1)[0])[:-30]
    with TestClient(build_app(host)) as client:
        for _ in range(30):
            assert client.post("/predict/files", files=[("images", ("a", damaged))]).status_code == 422
            assert client.post("/predict", json=IMAGES | {"budget": "1%"}).status_code == 422
            assert client.post("/predict", json=IMAGES | {"deadline_ms": 0.6}).status_code == 504
        assert client.post("/predict", json=IMAGES).status_code == 200


def test_nothing_of_the_last_hour_is_spent_in_the_next():
    model = served_model("expensive")
    policy = model.policies["expensive"]
    last, leases = policy.costs[-1], []

    def lease(name, cap, need, want):
        leases.append(need)
        return (1.9 * last, 0.2) if len(leases) == 1 else (need, 3600.0)  # the hour ends while the second is taken

    async def spend():
        caps = TenantCaps(lease, lambda: {"shop": 100 * last})
        async with caps.charged("shop", policy, 1) as charge:
            charge.spent = last
        async with caps.charged("shop", policy, 1) as charge:
            charge.spent = last
        return caps._wallets["shop"].left

    assert asyncio.run(spend()) == 0.0


def test_tenants_spend_what_their_cap_leaves_and_then_wait_for_the_next_hour(tmp_path):
    model = served_model("expensive")
    last = model.policies["expensive"].costs[-1]
    names = {name: f"a-token-of-the-{name}" for name in ("shop", "bank")}
    callers = {digest: Caller("predict", name) for name, each in names.items() for digest in Tokens.of(each).callers}
    caps = {"shop": 10 * last, "bank": None}
    sources = ModelHost.of(model, Limits()).sources
    host, tokens = ModelHost(sources, Limits(), caps=lambda: caps), Tokens(callers, caps)
    spent, statuses = 0.0, []
    with TestClient(build_app(host, Access(tokens))) as client:
        for _ in range(60):
            reply = client.post("/predict", json=IMAGES, headers=bearer("a-token-of-the-shop"))
            statuses.append(reply.status_code)
            if reply.status_code == 200:
                spent += sum(each["cost"] for each in reply.json()["predictions"])
        assert statuses[0] == 200
        assert statuses[-1] == 429
        assert 0 < int(reply.headers["Retry-After"]) <= 3601
        assert "'shop' has spent what it may in this hour" in reply.json()["error"]
        assert 0.9 * 10 * last < spent <= 10 * last
        assert client.post("/predict", json=IMAGES, headers=bearer("a-token-of-the-bank")).status_code == 200


@pytest.mark.slow  # starts services
def test_tokens_and_models_are_read_again_on_sighup_and_tls_is_spoken(tmp_path):
    for name in ("model", "unpaced.json"):
        (tmp_path / name).symlink_to(folder() / name)
    (tmp_path / "policy.json").write_bytes((folder() / "expensive.json").read_bytes())
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    made += ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-keyout", "key.pem", "-out", "cert.pem"]
    subprocess.run(made, cwd=tmp_path, check=True, capture_output=True)
    path = token_file(tmp_path / "tokens.json")
    line = "model policy.json --token-file tokens.json --tls-certificate cert.pem --tls-key key.pem"
    trusted = ssl.create_default_context(cafile=str(tmp_path / "cert.pem"))
    with (
        service(line, tmp_path, verify=trusted) as running,
        httpx.Client(verify=trusted, base_url=running.url) as client,
    ):
        assert running.url.startswith("https://")
        assert client.get("/status", headers=bearer(NAMES["predict"])).json()["policy"] == "policy"
        token_file(path, predict="another-token-of-role")
        (tmp_path / "policy.json").write_bytes((folder() / "cheap.json").read_bytes())
        before = client.get("/budget", headers=bearer(NAMES["admin"])).json()["budget"]
        running.process.send_signal(signal.SIGHUP)
        wait_until(lambda: client.get("/status", headers=bearer(NAMES["predict"])).status_code == 401)
        assert client.post("/predict", json=IMAGES, headers=bearer("another-token-of-role")).status_code == 200
        wait_until(lambda: client.get("/budget", headers=bearer(NAMES["admin"])).json()["budget"] < before)
        path.write_text("{")
        subprocess.run([*made[:-1], "other.pem"], cwd=tmp_path, check=True, capture_output=True)  # another key
        (tmp_path / "policy.json").write_bytes((folder() / "expensive.json").read_bytes())
        running.process.send_signal(signal.SIGHUP)
        wait_until(lambda: client.get("/budget", headers=bearer(NAMES["admin"])).json()["budget"] == before)
        kept = [each["part"] for each in running.lines if each["event"] == "not reloaded"]
        assert kept == ["tokens", "certificate"]  # and the models are read
        with httpx.Client(verify=trusted, base_url=running.url) as another:  # which shakes hands anew
            assert another.post("/predict", json=IMAGES, headers=bearer("another-token-of-role")).status_code == 200
