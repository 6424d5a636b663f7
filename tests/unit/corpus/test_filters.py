"""Filters: every drop has its reason, secrets do not pass, and licences are understood."""

from __future__ import annotations

import base64
import random
import string

import pytest

from etude.corpus.config import CorpusConfig, QualityConfig, Secrets, SourceConfig, TokenizerConfig
from etude.corpus.documents import Document
from etude.corpus.filters import filtered, quality_problem
from etude.corpus.licences import is_allowed, licence_of, nearest_licence
from etude.secrets import REDACTED, find_secrets, redact

CODE = "def area(width, height):\n    return width * height\n\n\ndef double(value):\n    return value + value\n"
ALNUM = string.ascii_letters + string.digits


def config(**changes: object) -> CorpusConfig:
    source = SourceConfig("own", "folder")  # type: ignore[arg-type]
    return CorpusConfig(TokenizerConfig("t"), (source,), **changes)  # type: ignore[arg-type]


def some(rng: random.Random, letters: str, length: int) -> str:
    return "".join(rng.choices(letters, k=length))


def planted(rng: random.Random) -> dict[str, str]:
    """A random secret of each kind, as it stands in code."""
    return {
        "private-key": f"-----BEGIN RSA PRIVATE KEY-----\n{some(rng, ALNUM, 64)}\n-----END RSA PRIVATE KEY-----",
        "aws-key-id": f'id = "AKIA{some(rng, string.ascii_uppercase + string.digits, 16)}"',
        "github-token": f"TOKEN=ghp_{some(rng, ALNUM, 36)}",
        "gitlab-token": f"glpat-{some(rng, ALNUM, 20)}",
        "slack-token": f"xoxb-{some(rng, string.digits, 12)}-{some(rng, ALNUM, 24)}",
        "google-key": f"AIza{some(rng, ALNUM, 35)}",
        "stripe-key": f"sk_live_{some(rng, ALNUM, 24)}",
        "openai-key": f"sk-proj-{some(rng, ALNUM, 47)}1",
        "huggingface-token": f"hf_{some(rng, string.ascii_letters, 34)}",
        "npm-token": f"npm_{some(rng, ALNUM, 36)}",
        "jwt": f"eyJ{some(rng, ALNUM, 30)}.eyJ{some(rng, ALNUM, 60)}.{some(rng, ALNUM, 43)}",
        "password-in-url": f"postgres://admin:{some(rng, ALNUM, 12)}@db.internal/main",
        "assigned-secret": f'api_key = "{some(rng, ALNUM, 30)}7a"',
        "aws-secret": f"AWS_SECRET_ACCESS_KEY={some(rng, ALNUM + '/+', 40)}",
        "azure-key": f"AccountName=main;AccountKey={some(rng, ALNUM + '/+', 86)}==;EndpointSuffix=core.windows.net",
        "telegram-token": f"bot = Bot({some(rng, string.digits, 9)}:AA{some(rng, ALNUM + '_-', 33)})",
        "twilio-key": f"SK{some(rng, 'abcdef' + string.digits, 32)}",
        "digitalocean-token": f"dop_v1_{some(rng, 'abcdef' + string.digits, 64)}",
        "authorization": f"curl -H 'Authorization: Bearer {some(rng, ALNUM, 30)}7a1'",
        "basic": "Authorization: Basic " + base64.b64encode(f"bob:{some(rng, ALNUM, 12)}".encode()).decode(),
        "netrc-password": f"machine api.internal login bob password {some(rng, ALNUM, 10)}7a1",
        "short-password-in-url": f"redis://:{some(rng, ALNUM, 4)}7@cache.internal/0",
        "env": f"DB_PASSWORD={some(rng, ALNUM + '!#+%', 12)}7a1",
        "yaml": f"  password: {some(rng, ALNUM, 10)}7a1  # of the test user",
        "yaml-key": f"api_key: {some(rng, ALNUM, 24)}7a1",
        "secret-key": f"SECRET_KEY = 'django-insecure-{some(rng, ALNUM + '!@#$%^&*(-_=+)', 48)}a7'",
        "secret-key-default": f'SECRET_KEY = env("SECRET_KEY", default="{some(rng, ALNUM + "!@#$%^&*(-_=+)", 48)}a7")',
        "secret-in-url": f"curl 'https://api.internal/v1/rows?limit=3&api_key={some(rng, ALNUM, 24)}7a1&page=2'",
        "log": f"info: password={some(rng, ALNUM, 12)}7a1",
        "ini": f"secret_key = {some(rng, ALNUM, 16)}7a1",
    }


def test_no_planted_secret_passes_and_it_is_redacted_wholly():
    rng = random.Random(0)
    for _ in range(20):
        for kind, secret in planted(rng).items():
            text = f"{CODE}\n{secret}\n"
            found = list(find_secrets(text))
            assert found, (kind, secret)
            assert filtered(Document("a", text), config()).reason == "secret"
            kept = filtered(Document("a", text), config(secrets=Secrets.REDACT))
            assert kept.document is not None
            assert REDACTED in kept.document.text
            assert not list(find_secrets(kept.document.text)), kept.document.text
            assert kept.document.text == redact(text, found)


@pytest.mark.parametrize(
    "text",
    [
        'password = getpass("Password: ")',
        'token = "AKIAIOSFODNN7EXAMPLE"',
        "digest = 'e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855'",
        "see https://user:password@example.com/ and sk-learn",
        'SECRET_KEY = os.environ["SECRET_KEY"]',
        "SECRET_KEY = '{{ cookiecutter.project_1.secret_key_of_django }}'",
        "SECRET_KEY = '${SECRET_KEY_1_OF_THE_PRODUCTION_HOST}'",
        "https://x/y?token=${TOKEN_1}&api_key=YOUR_API_KEY_12345678&key_token=page_token_number_1",
        'url = f"https://x/y?access_token={token_number_1_of_this}"',
        'tokens = ["identifier_one", "identifier_two"]',
        "password: ${PASSWORD_2}\nDB_PASSWORD=changeme123\napi_key: your-api-key-123\npassword: str\ntoken: int64",
        'def login(password: str = "", token=TOKEN_2): pass\npassword = os.environ["PASSWORD_1"]',
        "token = sha256.hexdigest\nsecret = names_2[1]\nprivate_key: /etc/ssl/private/server1x.pem\nTOKEN=0x12ab34cd",
        "Authorization: Bearer YOUR_ACCESS_TOKEN_1\nAuthorization: Basic QWxhZGRpbjpvcGVuIHNlc2FtZQ==",
        "Authorization: Bearer <token1>\nmachine host.domain login bob password pass1\nredis://:admin@cache",
        "secretName: tls-for-service-v2\ntokenizer: roberta-large-v3\npassword: {{ vault_password1 }}",
    ],
)
def test_placeholders_and_digests_are_no_secrets(text):
    assert list(find_secrets(text)) == []


@pytest.mark.parametrize(
    ("text", "path", "reason"),
    [
        ("x", "", "too-short"),
        ("some more words\n" * 80_000, "", "too-large"),
        ("a = 1\n" * 20 + "b" * 6_000, "", "long-lines"),
        ("+-*/ " * 40, "", "not-alphanumeric"),
        ("the same line of text\n" * 60, "", "repetitive"),
        (CODE, "web/app.min.js", "generated"),
        (CODE, "proto/api_pb2.py", "generated"),
        ("# Code generated by protoc. DO NOT EDIT.\n" + CODE, "", "generated"),
        (" ".join(f"var{i}=f({i * 7});" for i in range(400)), "", "minified"),
        (CODE, "a.py", ""),
    ],
)
def test_a_drop_has_its_reason(text, path, reason):
    assert filtered(Document("a", text, path), config()).reason == reason


def test_other_alphabets_count_as_letters():
    assert quality_problem("Мама мыла раму, а папа читал газету. " * 2, QualityConfig(max_repeated=1.0)) == ""


def test_a_licence_is_that_of_the_header_then_of_the_file_and_unknown_is_refused_unless_allowed():
    header = "# SPDX-License-Identifier: GPL-3.0-or-later\n" + CODE
    only = config(licences=("MIT",))
    assert filtered(Document("a", header, licence="MIT"), only).reason == "licence"
    assert filtered(Document("a", CODE), only).reason == "licence"
    kept = filtered(Document("a", CODE, licence="MIT OR GPL-2.0"), only).document
    assert kept is not None
    assert kept.licence == "MIT OR GPL-2.0"
    assert filtered(Document("a", CODE), config(licences=("unknown",))).document is not None


@pytest.mark.parametrize("expression", ["MIT AND", "(MIT", "MIT)", "OR", "((((((", ")", "MIT MIT", "AND OR"])
def test_a_malformed_expression_is_not_allowed(expression):
    assert not is_allowed(expression, ["MIT"])


def test_the_licence_of_a_folder_holds_below_it():
    mit = "MIT License\n\nPermission is hereby granted, free of charge, to any person\n the above copyright notice and"
    assert licence_of(mit) == "MIT"
    assert licence_of("GNU GENERAL PUBLIC LICENSE\n Version 3, 29 June 2007") == "GPL-3.0"
    assert licence_of("All rights reserved") == ""
    assert nearest_licence("x/y/z.c", {"x": "MIT", "": "ISC"}) == "MIT"
