from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.shown_run import ShownRunFolder
from tests.unit.dash.browse import Browser
from tests.unit.releases.played import passed, settings

from etude.privacy import Level, PrivacyFolder, Subject
from etude.releases import Releases
from etude.signals import FeedbackFile, GivenSignal
from etude.signals.file import Sent
from etude.signals.versions import Observation
from etude.stores import DirectoryStore
from etude.weights.chain.branches import point


@pytest.fixture(scope="session")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ShownRunFolder]:
    """A run with three trained steps, whose conductor is gone. Tests do not change it."""
    made = ShownRunFolder(tmp_path_factory.mktemp("shown") / "runs" / "laptop")
    yield made
    made.close()


@pytest.fixture(scope="session")
def releases(shown: ShownRunFolder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with one release, of the newest version against the first, which is a canary."""
    path, store = tmp_path_factory.mktemp("releases") / "releases.sqlite", DirectoryStore(shown.path / "weights")
    point(store, "policy", shown.versions[0], branch="stable")
    found = Releases(path)
    begun = found.begin(store, shown.versions[-1], settings(), location=str(store.root), now=1.7e9)
    found.gate(passed(begun), now=1.7e9 + 60)
    found.advance(store, now=1.7e9 + 120)
    found.close()
    return path


@pytest.fixture(scope="session")
def privacy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of consent: two organisations, and two users of one of them."""
    path = tmp_path_factory.mktemp("privacy") / "privacy"
    with PrivacyFolder(path) as folder:
        for name, level in (
            ("acme", Level.TRAIN),
            ("other", Level.OFF),
            ("acme/bob", Level.OFF),
            ("acme/eve", Level.CAPTURE),
        ):
            folder.consent.set(Subject.parse(name), level)
    return path


@pytest.fixture(scope="session")
def feedback(shown: ShownRunFolder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of signals about answers of the newest version: two of bob, who kept one edit, and one of eve."""
    path = tmp_path_factory.mktemp("feedback") / "feedback.sqlite"
    with FeedbackFile(path, create=True) as file:
        for number, (user, value) in enumerate((("bob", 1.0), ("bob", 0.0), ("eve", 1.0))):
            response_id, now = file.ids.new("acme", user, "laptop"), time.time()
            given = GivenSignal(id=f"s{number}", response_id=response_id, name="kept", value=value)
            file.add([Sent("acme", user, [given])], [Observation("laptop", now - 60, str(shown.versions[-1]))])
    return path


@pytest.fixture
def browser(shown: ShownRunFolder, releases: Path, privacy: Path, feedback: Path) -> Browser:
    return Browser(shown.path, releases=releases, privacy=privacy, feedback=feedback)
