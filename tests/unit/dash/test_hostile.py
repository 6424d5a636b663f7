"""Texts, names and requests that try to get out of their place: nothing runs, nothing is reordered, nothing is read."""

from __future__ import annotations

import base64
import json
import random
import string
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import quote

import httpx
import msgspec
import pytest
from tests.shown_run import ShownRunFolder
from tests.unit.dash.browse import Browser, links, tags, texts

from etude.cli.dash import readers
from etude.dash import Runs
from etude.dash.runs import ShownRollout
from etude.dash.security import HEADERS
from etude.dash.text import visible
from etude.experience.transitions import State
from etude.gateway import Keys
from etude.records.view import RolloutView, TurnTokens
from etude.telemetry import Telemetry

EVIL = (
    "<script>alert(1)</script><img src=x onerror=alert(1)>\"><svg onload=alert(1)>' onmouseover='alert(1)</pre></div>"
    '<a href="javascript:alert(1)">x</a>{{ 7 * 7 }}{% raw %}</script><!-- --><style>*{display:none}</style>'
)
BIDI = "if access\u202e \u2066// admin\u2069 \u2066only\u200b\u2069 \x1b[2J\x00 \U000e0041\u200f"
PAGES = ("", "versions", "versions/1", "rollouts", "evaluations", "fleet")
ALLOWED = {
    "html", "head", "meta", "title", "link", "script", "body", "header", "div", "a", "nav", "form", "input", "main",
    "section", "p", "h1", "h2", "h3", "span", "strong", "b", "small", "dl", "dt", "dd", "ol", "ul", "li", "progress",
    "meter", "table", "thead", "tbody", "tr", "th", "td", "details", "summary", "pre", "code", "figure", "figcaption",
    "i", "svg", "g", "path", "line", "circle", "rect", "text",
}  # fmt: skip


def evil(rollout_id: str) -> tuple[str, str]:
    return f"{EVIL}\n[tool] {EVIL}\n{BIDI}", f"{EVIL} {BIDI}"


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ShownRunFolder]:
    """A run whose name, texts, reasons, engines, processes and evaluations are hostile."""
    path = tmp_path_factory.mktemp("hostile") / "runs" / 'a"><script>alert(1)<' / "x"
    path = path.with_name("b\"><img src=x onerror=alert(1)>'{{7*7}}")
    path.parent.mkdir(parents=True)
    made = ShownRunFolder(path, steps=1, says=evil)
    log = Telemetry(path / "events" / "hostile.jsonl", process=EVIL)
    log.event("fleet.state", engine=f"engine-{EVIL}", region=EVIL, state=EVIL, url=EVIL)
    log.event("fleet.load", engine=f"engine-{EVIL}", region=EVIL, state=EVIL, step=10**30, num_running=float("inf"))
    log.event("process", name=EVIL + BIDI, state=EVIL, pid=-1, reason=EVIL)
    log.event("eval.result", name=EVIL, split=EVIL, step=1, rate=0.5, low=-1e9, high="x", num_tasks=EVIL)
    log.event("engine.trouble", reason=EVIL + BIDI)
    log.event("phase", phase=EVIL, state="start")
    log.event("rl.step", step=2, num_steps=EVIL, reward_mean=0.1, lag={EVIL: 1, "0": EVIL}, invalid={EVIL: 3})
    log.close()
    made.ledger.admit(made.spec("g900001.0"))
    made.ledger.move("g900001.0", "cancelled", reason=EVIL + BIDI)
    made.ledger.admit(made.spec('"><script>alert(1)</script>.0'))
    yield made
    made.close()


def check(html: str) -> None:
    """The page has only elements and attributes that our templates write."""
    for tag, attributes in tags(html):
        assert tag in ALLOWED, tag
        assert not [name for name in attributes if name.startswith("on") or name in ("style", "srcdoc", "formaction")]
        assert tag != "script" or attributes == {"src": "/static/dash.js", "defer": ""}
        for name in ("href", "src", "action"):
            target = attributes.get(name, "/")
            assert target.startswith(("/", "?", "#")) or target.isdecimal(), f"{tag} {name}={target}"
    assert not set("\u202e\u2066\u2069\u200b\u200f\x1b\x00\U000e0041") & set(html)


def test_hostile_texts_stay_text_on_every_page(hostile: ShownRunFolder) -> None:
    browser = Browser(hostile.path)
    base = browser.get("/").headers["location"]
    rollout = "rollouts/g000001.0"
    more = (rollout, f"{rollout}/turns/0", f"{rollout}/turns/3", "rollouts/g900001.0", f"rollouts/{quote(EVIL[:60])}")
    for page in (*PAGES, *more, "rollouts/%22%3E%3Cscript%3Ealert(1)%3C%2Fscript%3E.0"):
        found = browser.get(base + page)
        assert found.status_code in (200, 404), page
        check(found.text)
    page = texts(browser.get(f"{base}{rollout}"))
    assert "<script>alert(1)</script>" in page, "the text itself is shown"
    assert "{{ 7 * 7 }}" in page
    assert "if access⟦202E⟧ ⟦2066⟧// admin⟦2069⟧" in page


def test_hostile_texts_stay_text_in_the_live_view(hostile: ShownRunFolder) -> None:
    browser = Browser(hostile.path)
    run = browser.dash.runs.get(hostile.path.name)
    assert run is not None
    parts = browser.dash._live_page(run).parts()
    assert EVIL[:20] not in json.dumps(parts)
    for html in parts.values():
        check(html)
    assert "alert(1)" in parts["warnings"], "the trouble of an engine is told"


@dataclass
class Long:
    """A rollout whose first turn has a text of ten megabytes."""

    whole: ShownRollout

    @property
    def view(self) -> RolloutView:
        first, *others = self.whole.view.turns
        said = "[tool] " + "<b>line</b> of a log\n" * 500_000
        return msgspec.structs.replace(self.whole.view, turns=(msgspec.structs.replace(first, prompt=said), *others))

    def tokens(self, turn: int, start: int, stop: int) -> TurnTokens | None:
        return self.whole.tokens(turn, start, stop)


def test_a_transcript_of_ten_megabytes_is_shown_in_parts_of_bounded_size(shown: ShownRunFolder) -> None:
    usual = readers()
    browser = Browser(shown.path)
    long = replace(usual, rollout=lambda *given: Long(usual.rollout(*given)))
    browser.dash.runs = Runs(shown.path, long)
    page = browser.get("/run/laptop/rollouts/g000001.0")
    turn = browser.get("/run/laptop/rollouts/g000001.0/turns/0")
    assert "more characters" in texts(page)
    next_part = links(turn, "/run/laptop/rollouts/g000001.0/turns/0", rel="next")
    assert next_part == ["/run/laptop/rollouts/g000001.0/turns/0?at=40000"]
    last = browser.get("/run/laptop/rollouts/g000001.0/turns/0?at=10480000")
    assert "of 10,500,0" in texts(last)
    for found in (page, turn, last):
        assert found.status_code == 200
        assert len(found.content) < 1_000_000
        check(found.text)


def test_every_response_forbids_foreign_scripts_frames_and_guessed_types(browser: Browser) -> None:
    urls = ["/", "/run/laptop/", "/nowhere", "/static/dash.js", "/static/none", "/releases/9", "/run/laptop/rollouts/x"]
    for found in [*browser.all(urls), *browser.all(["/"], method="POST"), browser.get("/", host="evil.example")]:
        for name, value in HEADERS.items():
            assert name in found.headers
            assert found.headers[name] == value or name == "cache-control"
    policy = dict(one.strip().split(" ", 1) for one in HEADERS["content-security-policy"].split(";"))
    assert policy["default-src"] == policy["script-src"] == policy["style-src"] == "'self'"
    assert policy["frame-ancestors"] == policy["base-uri"] == policy["object-src"] == "'none'"


def test_pages_need_nothing_from_elsewhere(browser: Browser) -> None:
    for url in ("/run/laptop/", "/run/laptop/rollouts/g000001.0"):
        assert "http://" not in browser.get(url).text
        assert "https://" not in browser.get(url).text
    for name in ("dash.css", "dash.js"):
        found = browser.get(f"/static/{name}")
        assert found.status_code == 200
        assert "//" not in found.text.replace("// ", "")
        assert "url(" not in found.text


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "0.0.0.0:8080", "[::]:1", "10.0.0.1"])
def test_without_a_key_only_requests_to_loopback_are_answered(browser: Browser, host: str) -> None:
    assert browser.get("/run/laptop/", host=host).status_code == 403
    assert browser.get("/static/dash.js", host=host).status_code == 403
    assert browser.get("/run/laptop/", host="localhost:8080").status_code == 200
    assert browser.get("/run/laptop/", host="[::1]:8080").status_code == 200


def test_with_a_key_every_page_needs_it(shown: ShownRunFolder) -> None:
    browser = Browser(shown.path, keys=Keys.of("s3cret:ü"))

    def basic(password: str) -> str:
        return "Basic " + base64.b64encode(f"me:{password}".encode()).decode()

    for url in ("/", "/run/laptop/", "/run/laptop/live", "/static/dash.js", "/nowhere"):
        for wrong in ("", "Basic x", "Basic !!!", basic("no"), basic(""), "Bearer no", "s3cret", "Basic bWU="):
            found = browser.get(url, authorization=wrong)
            assert found.status_code == 401, (url, wrong)
            assert found.headers["www-authenticate"].startswith("Basic ")
            assert "laptop" not in found.text
    for host in ("dash.example", "127.0.0.1"):
        assert browser.get("/run/laptop/", authorization=basic("s3cret:ü"), host=host).status_code == 200
    ascii_key = Browser(shown.path, keys=Keys.of("plain"))
    assert ascii_key.get("/run/laptop/", authorization="Bearer plain").status_code == 200
    assert ascii_key.get("/run/laptop/", x_api_key="plain").status_code == 200


def test_no_name_leads_out_of_the_run(shown: ShownRunFolder, tmp_path: Path) -> None:
    (shown.path.parent.parent / "run.json").write_text("{}")
    (shown.path.parent.parent / "secret.txt").write_text("the secret")
    browser = Browser(shown.path.parent)
    ways = [
        "..",
        "../..",
        "..%2f..%2fsecret.txt",
        "%2e%2e",
        "....//",
        "/etc/passwd",
        "%2fetc%2fpasswd",
        "laptop/..",
        "%00",
        ".",
    ]
    for way in ["..", ".", "", "../runs/laptop", "laptop/..", "laptop/events", str(tmp_path), "/etc", "\0"]:
        assert browser.dash.runs.get(way) is None
    for way in ways:
        for url in (
            f"/run/{way}/", f"/run/{way}/rollouts", f"/static/{way}", f"/run/laptop/rollouts/{way}",
            f"/run/laptop/versions/{way}", f"/run/laptop/rollouts/{way}/turns/0",
                f"/run/laptop/versions?at={way}&of={way}",
        ):  # fmt: skip
            found = browser.get(url)
            assert found.status_code in (200, 302, 404), url
            assert "the secret" not in found.text
            assert "root:" not in found.text


def test_no_url_is_answered_with_an_error_of_the_server(browser: Browser, hostile: ShownRunFolder) -> None:
    rng = random.Random(0)
    words = [
        "run", "laptop", "versions", "rollouts", "turns", "live-not", "find", "evaluations", "fleet", "releases",
        "consent", "static", "dash.css", "g000002.1", "g000001.0", "0", "2", "-1", "9" * 30, "1e9", "v000002-",
        "v000002-aaaaaaaa-bbbbbbbbbbbb", "..", ".", "", "%00", "%ff", "%c3%28", "ü", "\U0001f600", "%", "a" * 300,
        "'", '"',
        "<b>", "{{7*7}}", "%0d%0aset-cookie:x", "trained", *State,
    ]  # fmt: skip
    names = ["before", "at", "of", "state", "token", "q", "x", "%00"]
    urls = []
    for _ in range(1500):
        path = "/".join(rng.choice(words) for _ in range(rng.randint(1, 6)))
        start = rng.choice(
            ["", "run/laptop/", "run/laptop/rollouts/", "run/laptop/versions/", "run/laptop/rollouts/g000002.1/turns/"]
        )
        query = "&".join(f"{rng.choice(names)}={rng.choice(words)}" for _ in range(rng.randint(0, 3)))
        urls.append(f"/{start}{path}" + (f"?{query}" if query else ""))
    urls += ["/" + "".join(rng.choices(string.printable, k=rng.randint(1, 60))).strip() for _ in range(300)]
    for url in urls:
        try:
            found = browser.get(url.replace("#", "%23"))
        except httpx.InvalidURL:  # the client cannot send it
            continue
        assert found.status_code < 500, url
        assert "set-cookie" not in found.headers


def test_only_reading_is_offered(browser: Browser) -> None:
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"):
        [found] = browser.all(["/run/laptop/"], method=method)
        assert found.status_code == 405
    [head] = browser.all(["/run/laptop/"], method="HEAD")
    assert (head.status_code, head.content) == (200, b"")
    assert browser.get("/run/laptop/?x=" + "a" * 5000).status_code == 414


def test_marks_that_pile_up_on_a_character_are_cut() -> None:
    assert visible("a" + "\u0301" * 500 + "b") == "a" + "\u0301" * 8 + "b"
    assert visible("é ü 日本 🙂 \t\n") == "é ü 日本 🙂 \t\n"
