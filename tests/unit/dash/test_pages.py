"""What the pages show of a run: its versions, batches, rollouts, tokens, evaluations, releases and consent."""

from __future__ import annotations

import contextlib
import re
import shutil
from pathlib import Path

import pytest
from tests.shown_run import CHAT, ShownRunFolder
from tests.unit.dash.browse import Browser, links, texts
from tests.unit.releases.played import passed, settings

from etude.experience.trace_reader import read_rollout
from etude.experience.traces import trace_path
from etude.records.completion import Version
from etude.releases import Releases
from etude.stores import DirectoryStore
from etude.weights.chain.branches import point

PAGES = (
    "", "versions", "versions/0", "versions/2", "versions/2?state=trained", "rollouts", "rollouts?state=trained",
    "rollouts/g000002.1", "rollouts/g900000.0", "rollouts/g000002.1/turns/0", "rollouts/g000002.1/turns/2?token=1",
    "evaluations", "fleet",
)  # fmt: skip
"""Pages of the run "laptop" of `shown`."""


def test_the_first_page_leads_to_the_run(browser: Browser) -> None:
    found = browser.get("/")
    assert (found.status_code, found.headers["location"]) == (302, "/run/laptop/")


@pytest.mark.parametrize("page", PAGES)
def test_every_page_of_a_run_is_shown(page: str, browser: Browser) -> None:
    assert browser.get(f"/run/laptop/{page}").status_code == 200


def test_every_link_of_every_page_leads_to_a_page(browser: Browser) -> None:
    waiting, met = ["/"], {"/"}
    while waiting:
        url = waiting.pop()
        found = browser.get(url)
        assert found.status_code in (200, 302) or url.endswith("/versions/4"), f"{url}: {found.status_code}"
        for link in [*links(found, url), *([found.headers["location"]] if found.status_code == 302 else [])]:
            assert link.startswith("/"), f"{url} links to {link}"
            if link not in met and len(met) < 120:
                met.add(link)
                waiting.append(link)
    assert {"/run/laptop/versions/3", "/run/laptop/rollouts/g001003.0", "/releases/1", "/consent"} <= met


def test_a_version_is_shown_with_its_parent_its_delta_its_batch_and_who_is_served_by_it(
    browser: Browser, shown: ShownRunFolder
) -> None:
    page = texts(browser.get("/run/laptop/versions/3"))
    newest, parent = str(shown.versions[3]), str(shown.versions[2])
    for said in (
        newest,
        parent,
        "b000003",
        "newest",
        "canary",
        "release 1: candidate, canary, 10 % of users",
        "8 trained",
    ):
        assert said in page, said
    assert "g000003.0" in page, "the rollouts of its batch"
    assert "release 1: stable, canary, 90 % of users" in texts(browser.get("/run/laptop/versions/0"))
    table = texts(browser.get("/run/laptop/versions"))
    assert all(str(one) in table for one in shown.versions)


def test_a_version_shows_the_signals_about_its_answers_each_user_by_its_mean(browser: Browser) -> None:
    page = texts(browser.get("/run/laptop/versions/3"))
    assert "mean over users kept 3 3 2 0.750" in " ".join(page.split()), page
    assert "none about its answers" in texts(browser.get("/run/laptop/versions/2"))


def test_without_a_file_of_feedback_a_version_says_how_to_see_signals(shown: ShownRunFolder) -> None:
    assert "start with --feedback FILE" in texts(Browser(shown.path).get("/run/laptop/versions/3"))


def test_a_rollout_leads_to_its_version_its_batch_and_its_siblings(browser: Browser, shown: ShownRunFolder) -> None:
    found = browser.get("/run/laptop/rollouts/g000002.1")
    assert {
        "/run/laptop/versions/2", f"/run/laptop/versions/{shown.versions[2]}", "/run/laptop/rollouts/g000002.0",
        "/run/laptop/rollouts/g000002.1/turns/0",
    } <= set(links(found, "/run/laptop/rollouts/g000002.1"))  # fmt: skip
    page = texts(found)
    for said in (
        "b000002",
        "fix the failing test of g000002.1",
        "branch from turn 0",
        "conversation 2",
        "side",
        "tests",
    ):
        assert said in page, said


def test_the_token_strip_has_of_each_token_what_engine_and_learner_recorded(
    browser: Browser, shown: ShownRunFolder
) -> None:
    tree = read_rollout(trace_path(shown.path / "traces", 2), "g000002.1")
    assert tree is not None
    turn = tree.trace.turns[0]
    [given] = {float(value) for _, sample in tree.samples for value in sample.advantages}
    steps = [span.version.step for span in turn.completion.spans for _ in range(span.num_tokens)]
    assert len(set(steps)) == 2, "two versions sampled this turn"
    page = browser.get("/run/laptop/rollouts/g000002.1/turns/0").text
    said = re.findall(r'title="(token [^"]*)"', page)
    assert len(said) == len(turn.completion.token_ids)
    for i, (token, logprob) in enumerate(zip(turn.completion.token_ids, turn.completion.logprobs, strict=True)):
        text = (
            repr(CHAT.decode([int(token)], special=True))
            .replace("<", "&lt;")
            .replace(">", "&gt;")
            .replace("'", "&#39;")
        )
        weights = f"weights of step {steps[i]}"
        assert (
            said[i] == f"token {i}: {text}, {weights}, log-probability {logprob:.3f}, trained, advantage {given:+.3g}"
        )
    side = browser.get("/run/laptop/rollouts/g000002.1/turns/3").text
    assert "not trained" in side
    assert "trained, advantage" not in side, "a side call is not trained"


def test_long_lists_are_paged_and_each_rollout_is_on_one_page(
    browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("etude.dash.app.PAGE_ROLLOUTS", 7)
    for first in ("/run/laptop/rollouts", "/run/laptop/rollouts?state=trained", "/run/laptop/versions/2"):
        url, met = first, list[str]()
        while url:
            found = browser.get(url)
            met += re.findall(r'class="mono" href="/run/laptop/rollouts/(g\d+\.\d)"', found.text)
            url = next(iter(links(found, url, rel="next")), "")
        expected = {"/run/laptop/rollouts": 25, "/run/laptop/rollouts?state=trained": 24}.get(first, 8)
        assert len(met) == len(set(met)) == expected, first


def test_versions_are_paged_without_a_gap(
    browser: Browser, shown: ShownRunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("etude.dash.app.PAGE_VERSIONS", 2)
    url, met = "/run/laptop/versions", list[str]()
    while url:
        found = browser.get(url)
        met += re.findall(r"<a class=\"mono\" href=\"[^\"]*\">(v\d{6}-[0-9a-f-]*)</a>", found.text)
        url = next(iter(links(found, url, rel="next")), "")
    assert met == [str(one) for one in reversed(shown.versions)]


def test_releases_are_shown_with_every_transition(browser: Browser) -> None:
    page = texts(browser.get("/releases/1"))
    assert "candidate" in page
    assert "10 % of users" in page
    assert "passed its gate" in page
    assert browser.get("/releases/2").status_code == 404


def test_a_promoted_version_serves_the_users_that_no_canary_has(shown: ShownRunFolder, tmp_path: Path) -> None:
    store = DirectoryStore(Path(shutil.copytree(shown.path / "weights", tmp_path / "store")))
    old, second, third, path = *shown.versions[:3], tmp_path / "releases.sqlite"
    for branch in ("stable", "canary"):
        point(store, "policy", old, branch=branch)
    browser = Browser(shown.path, releases=path)
    with contextlib.closing(Releases(path)) as releases:

        def canary(version: Version) -> None:
            release = releases.begin(store, version, settings(), location=str(store.root), now=0.0)
            releases.gate(passed(release), now=0.0)
            releases.advance(store, now=0.0)

        canary(second)
        releases.promote(store, reason="better", now=1.0)
        for page in ("/releases/1", "/releases"):
            assert "promoted 100 %" in " ".join(texts(browser.get(page)).split())
        assert "release 1: candidate, promoted, 100 % of users" in texts(browser.get("/run/laptop/versions/1"))
        assert "% of users" not in texts(browser.get("/run/laptop/versions/0")), "it serves nobody"
        point(store, "policy", second, branch="canary")  # as the next release asks
        canary(third)
        assert "promoted 90 % of users" in " ".join(texts(browser.get("/releases/1")).split())
        found = texts(browser.get("/run/laptop/versions/1"))
        assert "release 2: stable, canary, 90 % of users" in found
        assert found.count("% of users") == 1
        assert "release 2: candidate, canary, 10 % of users" in texts(browser.get("/run/laptop/versions/2"))


def test_consent_is_shown_as_counts_without_any_name(browser: Browser, privacy: Path) -> None:
    page = texts(browser.get("/consent"))
    assert "acme" not in page
    assert "bob" not in page
    assert re.search(r"Organisations by level level number off 1 train 1", page), page
    assert re.search(r"Users with a level of their own level number off 1 capture 1", page), page


def test_a_folder_of_runs_lists_them_and_leads_to_each(shown: ShownRunFolder) -> None:
    (shown.path.parent / "not-a-run").mkdir(exist_ok=True)
    browser = Browser(shown.path.parent)
    found = browser.get("/")
    assert links(found, "/") == ["/", "/run/laptop/"]
    assert browser.get("/run/laptop/").status_code == 200
    assert browser.get("/run/not-a-run/").status_code == 404
    assert "/releases" not in links(browser.get("/run/laptop/"), "/run/laptop/")


def test_the_search_field_finds_rollouts_and_versions(browser: Browser) -> None:
    for text, leads in (("g000001.2", "rollouts/g000001.2"), ("2", "versions/2"), ("v000002-", "versions/v000002-")):
        found = browser.get(f"/run/laptop/find?q={text}")
        assert found.headers["location"] == f"/run/laptop/{leads}"
