from __future__ import annotations

import json
import threading
import time

import pytest
from tests.served_answers import VERSION, served_answer

from etude.errors import PrivacyError
from etude.privacy import Captured, CaptureWriter, Level, PrivacyFolder, RecordDamaged, Subject, SubjectErased
from etude.records.served import ServedAnswer

ACME, BOB, EVE = Subject.of("acme"), Subject.of("acme", "bob"), Subject.of("acme", "eve")
WAIT_S = 60.0


def captured(folder: PrivacyFolder, subject: Subject = ACME) -> list[Captured]:
    return folder.records.of(folder.keys.names(subject))


def write(path, *answers: ServedAnswer, **settings) -> dict[str, int]:
    writer = CaptureWriter(path, **settings)
    for answer in answers:
        writer.offer(answer)
    assert writer.close(WAIT_S)
    return {name: number for name, number in writer.counts().items() if number}


@pytest.fixture
def folder(tmp_path):
    with PrivacyFolder(tmp_path / "privacy") as opened:
        opened.consent.set(ACME, Level.TRAIN)
        yield opened


@pytest.fixture
def path(folder, tmp_path):
    return tmp_path / "privacy"


def test_an_answer_is_kept_with_its_tokens_version_and_level(folder, path):
    assert write(path, served_answer("bob", said="the answer")) == {"captured": 1}
    (record,) = captured(folder, BOB)
    assert (record.level, record.version, record.response_id) == (Level.TRAIN, str(VERSION), "ab" * 16)
    content = folder.records.read(record)
    assert json.loads(content.reply)["content"] == "the answer"
    assert json.loads(content.messages) == [{"role": "user", "content": "say the answer"}]
    assert bytes(content.token_ids.tolist()) == b"the answer"
    assert content.prompt_ids.tolist() == [0, 1, 2, 3, 4]
    assert content.logprobs.tolist() == [-0.5] * 10
    assert content.spans[0].version == VERSION
    assert folder.records.of_response("ab" * 16) == [record]


@pytest.mark.parametrize("level", list(Level))
def test_no_more_is_kept_than_the_level_allows(folder, path, level):
    folder.consent.set(BOB, level)
    counts = write(path, served_answer("bob"))
    records = captured(folder, BOB)
    if level is Level.OFF:
        assert (counts, records) == ({"no_consent": 1}, [])
        return
    content = folder.records.read(records[0])
    assert records[0].level is level
    assert (content.num_prompt, content.num_sampled, content.finish) == (5, 5, "stop")
    has = [bool(content.messages), bool(content.reply), content.token_ids is not None, content.prompt_ids is not None]
    assert has == [level >= Level.CAPTURE] * 4
    assert bool(content.spans) is (content.logprobs is not None) is (level >= Level.CAPTURE)


def test_consent_that_came_after_an_answer_does_not_cover_it(folder, path):
    before = time.time()
    folder.consent.set(BOB, Level.OFF)
    off = time.time()
    folder.consent.set(BOB, Level.TRAIN)
    assert write(path, served_answer("bob", at=off)) == {"no_consent": 1}
    assert write(path, served_answer("bob", at=before - 1)) == {"no_consent": 1}  # the organisation had not agreed
    assert write(path, served_answer("bob")) == {"captured": 1}


def test_a_withdrawal_between_batch_and_commit_takes_records_out(folder, path):
    write(path, served_answer("bob"), served_answer("eve"), served_answer())
    ids = {subject: {one.record_id for one in captured(folder, subject)} for subject in (ACME, BOB, EVE)}
    assert folder.usable(ids[ACME], Level.TRAIN) == ids[ACME]
    folder.consent.set(BOB, Level.METRICS)
    left = ids[ACME] - ids[BOB]
    unnamed = left - ids[EVE]
    assert folder.usable(ids[ACME], Level.TRAIN) == ids[EVE]  # the request that named no user may be bob's
    assert folder.usable(ids[ACME], Level.METRICS) == ids[ACME]
    folder.consent.set(BOB, Level.TRAIN)
    assert folder.usable(left, Level.TRAIN) == ids[EVE] | unnamed


def test_a_record_is_never_used_for_more_than_it_was_captured_for(folder, path):
    folder.consent.set(BOB, Level.CAPTURE)
    write(path, served_answer("bob"))
    folder.consent.set(BOB, Level.TRAIN)
    ids = [one.record_id for one in captured(folder, BOB)]
    assert folder.usable(ids, Level.TRAIN) == set()
    assert folder.usable(ids, Level.CAPTURE) == set(ids)


def test_erasing_a_user_makes_raw_data_unreadable_and_leaves_the_others(folder, path):
    write(path, served_answer("bob", said="bobs words"), served_answer("eve"))
    (bobs,) = captured(folder, BOB)
    key = folder.keys.find(bobs.names)
    copy = path.parent / "copy.sqlite"  # a thief's copy of the records, from before
    folder.records._db.execute("VACUUM INTO ?", (str(copy),))
    folder.records.link(bobs.record_id, "rollout-1")
    done = folder.erase(BOB)
    assert (done.num_keys, done.records, done.rollouts) == (1, [bobs], ["rollout-1"])
    with pytest.raises(SubjectErased):
        folder.records.read(bobs)
    assert [one.record_id for one in captured(folder)] == [one.record_id for one in captured(folder, EVE)]
    assert folder.records.read(captured(folder, EVE)[0]).num_sampled == 5
    for file in path.rglob("*"):
        assert file.is_dir() or key.secret not in file.read_bytes()
    copy.replace(path / "records.sqlite")  # not even the copy can be read
    with PrivacyFolder(path) as stolen, pytest.raises(SubjectErased):
        stolen.records.read(bobs)


def test_a_subject_that_was_erased_is_off_and_its_uses_stay_known(folder, path):
    write(path, served_answer("bob"))
    (record,) = captured(folder, BOB)
    folder.records.link(record.record_id, "rollout-1")
    folder.records.link(record.record_id, "rollout-1")
    folder.erase(BOB)
    assert write(path, served_answer("bob")) == {"no_consent": 1}
    assert folder.erase(BOB).rollouts == ["rollout-1"]
    assert folder.usable([record.record_id], Level.METRICS) == set()
    with pytest.raises(SubjectErased):
        folder.records.link(record.record_id, "rollout-2")
    folder.consent.set(BOB, Level.CAPTURE)
    assert write(path, served_answer("bob")) == {"captured": 1}
    (new,) = captured(folder, BOB)
    assert new.key_id != record.key_id


def test_erasing_an_organisation_erases_all_its_users(folder, path):
    folder.consent.set(Subject.of("other"), Level.TRAIN)
    write(path, served_answer("bob"), served_answer("eve"), served_answer(), served_answer(organisation="other"))
    done = folder.erase(ACME)
    assert (done.num_keys, len(done.records)) == (3, 3)
    assert captured(folder) == []
    assert folder.consent.level(EVE) is Level.OFF
    assert len(captured(folder, Subject.of("other"))) == 1


def test_a_record_of_an_erased_key_is_not_read_with_a_later_one(folder, path):
    write(path, served_answer("bob"))
    (record,) = captured(folder, BOB)
    folder.keys.destroy(record.names)
    folder.keys.find_or_create(record.names)
    with pytest.raises(SubjectErased):
        folder.records.read(record)


@pytest.mark.parametrize(
    "column", ["level = 3", "at = at - 1", "expires = expires + 9e9", "response_id = 'x'", "model = 'y'"]
)
def test_a_changed_column_is_damage(folder, path, column):
    folder.consent.set(BOB, Level.CAPTURE)
    write(path, served_answer("bob"))
    folder.records._db.execute(f"UPDATE records SET {column}")
    with pytest.raises(RecordDamaged):
        folder.records.read(captured(folder, BOB)[0])


def test_columns_that_are_no_record_are_a_named_error(folder, path):
    write(path, served_answer("bob"))
    folder.records._db.execute("UPDATE records SET level = 9")
    with pytest.raises(RecordDamaged):
        captured(folder, BOB)


def test_expired_records_are_not_returned_and_then_deleted(folder, path):
    write(path, served_answer("eve"))
    assert write(path, served_answer("bob"), keep_days=1e-9) == {"captured": 1}
    assert captured(folder, BOB) == []
    assert folder.records._db.execute("SELECT count(*) FROM records").fetchone() == (2,)
    assert folder.records.expire() == 1
    assert folder.records._db.execute("SELECT count(*) FROM records").fetchone() == (1,)


def test_a_full_queue_drops_and_counts_and_offers_return(folder, path):
    with folder.keys.lock():  # the writer waits for it, as for a slow disk
        writer = CaptureWriter(path, max_queued=4)
        for _ in range(500):
            writer.offer(served_answer("bob"))
        assert writer.counts()["dropped"] >= 500 - 4 - 64
    assert writer.close(WAIT_S)
    counts = writer.counts()
    assert counts["captured"] + counts["dropped"] == 500
    assert counts["captured"] == len(captured(folder)) > 0
    assert folder.records.counts() == {name: number for name, number in counts.items() if number}


def test_the_size_of_what_waits_is_bounded(folder, path):
    with folder.keys.lock():
        writer = CaptureWriter(path, max_queued_bytes=4096)
        for _ in range(100):
            writer.offer(served_answer("bob"))
        assert writer.counts()["dropped"] >= 90
    assert writer.close(WAIT_S)


def test_a_subject_without_a_valid_name_is_refused_and_counted(folder, path):
    assert write(path, served_answer("b\0b"), served_answer(organisation="a/b"), served_answer("bob")) == {
        "captured": 1,
        "refused": 2,
    }


def test_a_damaged_key_costs_its_subject_only(folder, path):
    write(path, served_answer("bob"))
    names = folder.keys.names(BOB)
    file = path / "keys" / names.organisation / names.subject
    data = bytearray(file.read_bytes())
    data[20] ^= 1
    file.write_bytes(data)
    assert write(path, served_answer("bob"), served_answer("eve")) == {"captured": 1, "failed": 1}
    with pytest.raises(PrivacyError, match=r"key .* is damaged"):
        folder.records.read(captured(folder, BOB)[0])


def test_an_error_turns_capture_off_with_a_warning_and_counts(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    writer = CaptureWriter(tmp_path / "file")
    writer.offer(served_answer())
    assert not writer.close(WAIT_S)
    writer.offer(served_answer())
    assert writer.counts()["failed"] == 2
    assert "capture is off" in caplog.text


def test_erasing_waits_for_what_is_being_captured_and_nothing_slips_in(folder, path):
    stop = threading.Event()
    writer = CaptureWriter(path)

    def offer():
        while not stop.is_set():
            writer.offer(served_answer("bob"))
            time.sleep(0.0005)

    thread = threading.Thread(target=offer)
    thread.start()
    try:
        while not captured(folder, BOB):
            time.sleep(0.01)
        folder.erase(BOB)
        assert captured(folder, BOB) == []
    finally:
        stop.set()
        thread.join()
    assert writer.close(WAIT_S)
    assert captured(folder, BOB) == []
    assert folder.keys.find(folder.keys.names(BOB)) is None


def test_a_key_whose_destruction_was_cut_short_is_destroyed(folder, path):
    write(path, served_answer("bob"))
    (record,) = captured(folder, BOB)
    file = path / "keys" / record.organisation / record.subject
    file.write_bytes(bytes(file.stat().st_size))
    with pytest.raises(SubjectErased):
        folder.records.read(record)
    assert folder.keys.find_or_create(record.names).id != record.key_id
