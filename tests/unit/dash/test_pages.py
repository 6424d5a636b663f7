"""What the pages show of a run: its versions, batches, rollouts, tokens, evaluations, releases and consent."""

from __future__ import annotations

from tests.shown_run import ShownRunFolder
from tests.unit.dash.browse import Browser


def test_the_first_page_leads_to_the_run(browser: Browser) -> None:
    found = browser.get("/")
    assert (found.status_code, found.headers["location"]) == (302, "/run/laptop/")


def test_every_page_of_a_run_is_shown(browser: Browser, shown: ShownRunFolder) -> None:
    for at in ("", "versions", "versions/2", "rollouts", "rollouts/g000002.1", "rollouts/g000002.1/turns/0", "evaluations", "fleet"):
        found = browser.get(f"/run/laptop/{at}")
        assert found.status_code == 200, (at, found.text[:2000])
        open(f"/tmp/page-{at.replace('/','-')}.html","w").write(found.text)
    for at in ("/releases", "/releases/1", "/consent"):
        found = browser.get(at)
        assert found.status_code == 200
        open(f"/tmp/page-{at.replace('/','-')}.html","w").write(found.text)
