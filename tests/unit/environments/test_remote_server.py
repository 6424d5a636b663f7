"""The server of machines: keys, quotas, leases, states, with a runtime in memory and without a socket."""

from __future__ import annotations

import asyncio
import gc
import json
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.environments.remote import Keyring, Quota, RemoteRuntime, ServerConfig, Template, create_app
from etude.environments.remote.connect import Code
from etude.environments.remote.sandboxes import SandboxManager
from etude.environments.remote.templates import read_templates
from etude.errors import ConfigError, MachineError
from etude.testing import MemoryRuntime

ALICE, BOB = "e2b_" + "a" * 20, "e2b_" + "b" * 20


class Clock:
    """A clock that the test advances."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Side:
    """A client, and the server that it is connected to."""

    def __init__(self, http: httpx.AsyncClient, boxes: SandboxManager, clock: Clock) -> None:
        self.http, self.boxes, self.clock = http, boxes, clock

    async def make(self, **asked: Any) -> httpx.Response:
        headers = asked.pop("headers", {})
        return await self.http.post("/v2/sandboxes", json={"templateID": "base"} | asked, headers=headers)


def served(test: Callable[[Side], Awaitable[Any]], *, state_bytes: int = 1 << 20, **quota: Any) -> Any:
    """Run an async test with a server of two accounts. Its runtime keeps so many bytes of snapshots without a hold."""

    async def main() -> Any:
        clock, runtime = Clock(), MemoryRuntime(max_bytes=state_bytes)
        keys = Keyring({"alice": Quota(key=ALICE, **quota), "bob": Quota(key=BOB)}, clock=clock)
        templates = {"tpl": Template({"hi.txt": b"hi"})}
        app = create_app(runtime, keys, templates=templates, config=ServerConfig(paused_s=100.0), clock=clock)
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(
            transport=transport, base_url="http://etude", headers={"x-api-key": ALICE}
        ) as http:
            try:
                return await test(Side(http, app.state.manager, clock))
            finally:
                await app.state.manager.close()

    return asyncio.run(main())


@pytest.mark.parametrize(
    "headers", [{"x-api-key": ""}, {"x-api-key": ALICE[:-1]}, {"x-api-key": ALICE + "x"}, {"x-api-key": "ü"}]
)
@pytest.mark.parametrize("path", ["/v2/sandboxes", "/sandboxes/abc", "/snapshots", "/templates", "/etude/about"])
def test_without_a_good_key_nothing_is_answered(headers, path):
    async def test(side):
        answer = await side.http.get(path, headers={k: v.encode() for k, v in headers.items()})
        assert answer.status_code == 401
        assert set(answer.json()) == {"code", "message", "hint"}

    served(test)


def test_a_key_may_come_as_a_bearer_token():
    async def test(side):
        headers = {"x-api-key": "", "authorization": f"Bearer {BOB}"}
        assert (await side.http.get("/v2/sandboxes", headers=headers)).json() == []

    served(test)


def test_a_machine_of_one_account_is_not_there_for_another():
    async def test(side):
        made = (await side.make()).json()
        url = f"/sandboxes/{made['sandboxID']}"
        assert (await side.http.get(url)).json()["state"] == "running"
        for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/timeout"), ("POST", "/pause"), ("POST", "/fork")):
            answer = await side.http.request(method, url + path, headers={"x-api-key": BOB}, json={})
            assert answer.status_code == 404, path
        assert (await side.http.get("/v2/sandboxes", headers={"x-api-key": BOB})).json() == []

    served(test)


def test_only_so_many_machines_are_alive_and_an_ended_one_makes_room():
    async def test(side):
        made = [(await side.make()).json()["sandboxID"] for _ in range(2)]
        refused = await side.make()
        assert (refused.status_code, refused.headers["should-retry"]) == (429, "false")
        assert "2 of 2 are alive" in refused.json()["message"]
        forked = await side.http.post(f"/sandboxes/{made[0]}/fork", json={"count": 1})
        assert forked.status_code == 429
        assert (await side.http.delete(f"/sandboxes/{made[0]}")).status_code == 204
        assert (await side.http.delete(f"/sandboxes/{made[0]}")).status_code == 404
        assert (await side.make()).status_code == 201

    served(test, max_live=2)


def test_machines_are_made_only_so_fast_and_it_is_said_when_there_is_room_again():
    async def test(side):
        for _ in range(3):
            made = (await side.make()).json()["sandboxID"]
            await side.http.delete(f"/sandboxes/{made}")
        refused = await side.make()
        assert (refused.status_code, refused.headers["should-retry"]) == (429, "true")
        side.clock.now += int(refused.headers["retry-after"])
        assert (await side.make()).status_code == 201

    served(test, creations_per_minute=3)


def test_a_lease_ends_its_machine_and_can_be_renewed_up_to_the_longest_life():
    async def test(side):
        first, second = [(await side.make(timeout=50)).json()["sandboxID"] for _ in range(2)]
        side.clock.now += 40
        assert (await side.http.post(f"/sandboxes/{first}/timeout", json={"timeout": 100})).status_code == 204
        side.clock.now += 20
        await side.boxes.expire()
        assert [box.id for box in side.boxes.of(side.boxes.get(first).account)] == [first]
        assert (await side.http.get(f"/sandboxes/{second}")).status_code == 404
        for _ in range(5):
            await side.http.post(f"/sandboxes/{first}/refreshes", json={"duration": 100})
            side.clock.now += 50
            await side.boxes.expire()
        assert (await side.http.get(f"/sandboxes/{first}")).status_code == 404
        assert (await side.make(timeout=201)).status_code == 400

    served(test, max_lifetime_s=200)


def test_a_lease_may_pause_its_machine_which_is_kept_for_a_while():
    async def test(side):
        made = (await side.make(timeout=50, autoPause=True)).json()["sandboxID"]
        side.clock.now += 51
        await side.boxes.expire()
        assert (await side.http.get(f"/sandboxes/{made}")).json()["state"] == "paused"
        gone = await side.http.get("/files?path=x", headers={"e2b-sandbox-id": made})
        assert (gone.status_code, gone.json()["message"]) == (502, "The sandbox was not found")
        resumed = await side.http.post(f"/v2/sandboxes/{made}/connect", json={"timeout": 10})
        assert (resumed.status_code, resumed.json()["sandboxID"]) == (201, made)
        assert (await side.http.post(f"/sandboxes/{made}/pause", json={})).status_code == 204
        assert (await side.http.post(f"/sandboxes/{made}/pause", json={})).status_code == 409
        side.clock.now += 101
        await side.boxes.expire()
        assert (await side.http.get(f"/sandboxes/{made}")).status_code == 404

    served(test)


def test_a_creation_with_a_key_is_made_once_also_when_both_come_together():
    async def test(side):
        key = {"idempotency-key": "one"}
        both = await asyncio.gather(side.make(headers=key), side.make(headers=key))
        ids = {answer.json()["sandboxID"] for answer in both}
        assert len(ids) == 1
        await side.http.delete(f"/sandboxes/{ids.pop()}")
        again = await side.make(headers=key)
        assert (await side.http.get(f"/sandboxes/{again.json()['sandboxID']}")).status_code == 404
        assert (await side.http.get("/v2/sandboxes")).json() == []

    served(test)


def test_a_creation_that_failed_is_tried_again_with_its_key():
    async def test(side):
        key = {"idempotency-key": "one"}
        made = (await side.make()).json()["sandboxID"]
        assert (await side.make(headers=key)).status_code == 429
        await side.http.delete(f"/sandboxes/{made}")
        assert (await side.make(headers=key)).status_code == 201

    served(test, max_live=1)


def test_a_template_that_the_runtime_let_go_of_is_prepared_again():
    """Snapshots of another account can displace it from the bounded memory of a runtime."""

    async def test(side):
        assert (await side.make(templateID="tpl")).status_code == 201
        side.boxes.runtime._snapshots.clear()
        assert (await side.make(templateID="tpl")).status_code == 201

    served(test)


def test_a_machine_that_is_killed_while_it_is_resumed_is_not_left_over():
    async def test(side):
        made = (await side.make()).json()["sandboxID"]
        await side.http.post(f"/sandboxes/{made}/pause", json={})
        answers = await asyncio.gather(
            side.http.delete(f"/sandboxes/{made}"),
            side.http.post(f"/v2/sandboxes/{made}/connect", json={"timeout": 10}),
            side.http.post(f"/sandboxes/{made}/fork", json={"count": 1}),
        )
        assert [answer.status_code for answer in answers] == [204, 404, 404]
        assert side.boxes.num_alive == 0

    served(test)


def test_machines_are_listed_by_metadata_state_template_and_page_by_page():
    async def test(side):
        for number in range(3):
            await side.make(metadata={"n o": f"ü{number}", "all": "1"}, templateID="tpl" if number else "base")

        async def ids(**query):
            return (await side.http.get("/v2/sandboxes", params=query)).json()

        assert [one["metadata"]["n o"] for one in await ids(order="asc")] == ["ü0", "ü1", "ü2"]
        assert len(await ids(metadata="n%20o=%C3%BC1")) == 1
        assert len(await ids(template="tpl")) == 2
        assert await ids(state="paused") == []
        first = await side.http.get("/v2/sandboxes", params={"limit": 2})
        second = await side.http.get("/v2/sandboxes", params={"limit": 2, "nextToken": first.headers["x-next-token"]})
        assert (len(first.json()), len(second.json()), "x-next-token" in second.headers) == (2, 1, False)
        assert (await side.http.get("/v2/sandboxes", params={"limit": "x"})).status_code == 400
        assert (await side.http.get("/v2/sandboxes", params={"startedAfter": "soon"})).status_code == 400

    served(test)


@pytest.mark.parametrize(
    "asked",
    [
        {"templateID": "absent"},
        {"timeout": -1},
        {"timeout": "long"},
        {"mcp": {"x": {}}},
        {"volumeMounts": [{"name": "v", "path": "/v"}]},
        {"network": {"allowOut": ["*"]}},
        {"metadata": {"a": 1}},
    ],
)
def test_a_machine_that_cannot_be_had_is_refused_in_three_parts(asked):
    async def test(side):
        answer = await side.make(**asked)
        assert answer.status_code in (400, 404)
        assert answer.json()["hint"]
        assert (await side.http.get("/v2/sandboxes")).json() == []

    served(test)


@pytest.mark.parametrize("body", [b"{", b"[]", b"\xff", b"{" * 100_000, b"x" * (2 << 20)])
def test_a_body_that_is_none_is_refused_by_name(body):
    async def test(side):
        answer = await side.http.post("/v2/sandboxes", content=body)
        assert answer.status_code in (400, 413)
        assert answer.json()["hint"]

    served(test)


def test_a_state_is_kept_under_a_name_and_machines_are_made_from_it():
    async def test(side):
        made = (await side.make(templateID="tpl")).json()["sandboxID"]
        kept = (await side.http.post(f"/sandboxes/{made}/snapshots", json={"name": "mine"})).json()
        for template in ("mine", kept["snapshotID"]):
            assert (await side.make(templateID=template)).status_code == 201
            assert (await side.make(templateID=template, headers={"x-api-key": BOB})).status_code == 404
        assert (await side.http.get("/snapshots?name=mine")).json() == [kept]
        assert (await side.http.delete("/templates/mine")).status_code == 204
        assert (await side.http.delete("/templates/mine")).status_code == 404
        refused = await side.http.post(f"/sandboxes/{made}/snapshots", json={"memory": True})
        assert (refused.status_code, "memory" in refused.json()["message"]) == (400, True)

    served(test)


async def put(side: Side, sandbox: dict[str, str], data: bytes) -> None:
    own = {"e2b-sandbox-id": sandbox["sandboxID"], "x-access-token": sandbox["envdAccessToken"], "etude-exactly": "0"}
    assert (await side.http.post("/files?path=a", headers=own, files={"file": data})).status_code == 200


def test_no_account_evicts_paused_machines_or_snapshots_of_another():
    async def test(side):
        mine = [(await side.make()).json() for _ in range(3)]
        for number, one in enumerate(mine):
            await put(side, one, b"%d" % number * 40)
        paused, named, passing = (one["sandboxID"] for one in mine)
        assert (await side.http.post(f"/sandboxes/{paused}/pause", json={})).status_code == 204
        assert (await side.http.post(f"/sandboxes/{named}/snapshots", json={"name": "mine"})).status_code == 201
        unnamed = (await side.http.post(f"/sandboxes/{passing}/snapshots", json={})).json()["snapshotID"]
        bobs = {"x-api-key": BOB}
        theirs = (await side.make(headers=bobs)).json()
        for number in range(8):
            await put(side, theirs, b"%d" % number * 90)
            url = f"/sandboxes/{theirs['sandboxID']}/snapshots"
            assert (await side.http.post(url, json={}, headers=bobs)).status_code == 201
        assert (await side.make(templateID=unnamed)).status_code == 503
        assert (await side.make(templateID="mine")).status_code == 201
        assert (await side.http.post(f"/v2/sandboxes/{paused}/connect", json={"timeout": 9})).status_code == 201

    served(test, state_bytes=100)


def test_what_is_held_is_counted_and_a_machine_that_has_no_room_runs_on():
    async def test(side):
        account = side.boxes.get((first := (await side.make(autoPause=True, timeout=50)).json())["sandboxID"]).account
        await put(side, first, b"x" * (700 << 10))
        pause = f"/sandboxes/{first['sandboxID']}/pause"
        url = f"/sandboxes/{first['sandboxID']}/snapshots"
        assert (await side.http.post(url, json={"name": "mine"})).status_code == 201
        refused = await side.http.post(pause, json={})
        assert (refused.status_code, "max_state_mib" in refused.json()["hint"]) == (429, True)
        assert side.boxes.get(first["sandboxID"]).state == "running"
        assert (await side.http.post(url, json={"name": "again"})).status_code == 429
        assert (await side.http.delete("/templates/mine")).status_code == 204
        assert account.num_state_bytes == 0
        assert (await side.http.post(pause, json={})).status_code == 204
        assert account.num_state_bytes > 700 << 10
        resume = f"/v2/sandboxes/{first['sandboxID']}/connect"
        assert (await side.http.post(resume, json={"timeout": 50})).status_code == 201
        assert account.num_state_bytes == 0
        assert (await side.http.post(url, json={"name": "mine"})).status_code == 201
        side.clock.now += 51
        await side.boxes.expire()
        assert (await side.http.get(f"/sandboxes/{first['sandboxID']}")).status_code == 404  # no room for its pause

    served(test, max_state_mib=1)


def test_a_state_leaves_for_its_own_account_and_comes_back_for_whoever_has_it():
    async def test(side):
        made = (await side.make(templateID="tpl")).json()["sandboxID"]
        kept = (await side.http.post(f"/sandboxes/{made}/snapshots", json={})).json()["snapshotID"]
        url = f"/etude/snapshots/{kept}?max_bytes=1000"
        packed = (await side.http.get(url)).content
        assert (await side.http.get(url, headers={"x-api-key": BOB})).status_code == 404
        assert (await side.http.get(f"/etude/snapshots/{kept}")).status_code == 400
        bobs = {"x-api-key": BOB}
        taken = [await side.http.post("/etude/snapshots", content=packed, headers=bobs) for _ in range(2)]
        assert len({answer.json()["snapshotID"] for answer in taken}) == 1
        assert (await side.make(templateID=taken[0].json()["snapshotID"], headers=bobs)).status_code == 201
        forged = packed[:-1] + bytes([packed[-1] ^ 1])
        for bad in (b"", forged, packed[:40]):
            assert (await side.http.post("/etude/snapshots", content=bad)).status_code == 400
        strangers = packed[:20] + b"x" + packed[21:]
        assert (await side.http.post("/etude/snapshots", content=strangers)).status_code == 409

    served(test)


def test_snapshots_kept_by_etudes_clients_are_evicted_and_snapshots_named_by_others_are_not(monkeypatch):
    monkeypatch.setattr("etude.environments.remote.sandboxes.MAX_SNAPSHOTS", 3)

    async def test(side):
        made = (await side.make(templateID="tpl")).json()["sandboxID"]

        async def keep(name=None):
            return await side.http.post(f"/sandboxes/{made}/snapshots", json={"name": name} if name else {})

        assert [(await keep(name)).status_code for name in ("mine", None, "etude-a", "etude-b", "b", "c")] == [201] * 6
        assert (await keep()).status_code == 429
        listed = (await side.http.get("/snapshots")).json()
        assert sorted(name for one in listed for name in one["names"]) == ["b", "c", "mine"]

    served(test)


def test_a_machine_that_is_being_made_when_the_server_ends_is_not_left_over(monkeypatch):
    async def test(side):
        asked, go, made = asyncio.Event(), asyncio.Event(), []
        fork = side.boxes.runtime.fork

        async def slow(*args: Any, **options: Any) -> Any:
            asked.set()
            await go.wait()
            made.extend(await fork(*args, **options))
            return made

        monkeypatch.setattr(side.boxes.runtime, "fork", slow)
        making = asyncio.create_task(side.make())
        await asked.wait()
        await side.boxes.close()
        go.set()
        assert ((await making).status_code, side.boxes.num_alive, [one.closed for one in made]) == (503, 0, [True])

    served(test)


def held() -> Counter[str]:
    """Count live objects of etude's classes; without those with few objects."""
    gc.collect()
    names = (type(thing).__name__ for thing in gc.get_objects() if str(type(thing).__module__).startswith("etude."))
    return Counter({name: number for name, number in Counter(names).items() if number > 20})


def test_a_server_holds_nothing_of_machines_that_have_ended(monkeypatch):
    monkeypatch.setattr("etude.environments.remote.sandboxes._MAX_CREATIONS", 50)

    async def test(side):
        before = held()
        for number in range(100):
            made = (await side.make(timeout=50, headers={"idempotency-key": f"{number}"})).json()
            box = side.boxes.get(made["sandboxID"])
            own = {"e2b-sandbox-id": box.id, "x-access-token": box.token, "etude-exactly": "0"}
            sent = await side.http.post("/files?path=a.py", headers=own, files={"file": b"print('x' * 10_000)"})
            assert sent.status_code == 200
            exact = {"key": "1", "deadlineMs": 9000, "outputBytes": 65536, "tell": number % 2 == 0}
            asked = {"process": {"cmd": "python", "args": ["a.py"]}, "stdin": False, "etude": exact}
            body = json.dumps(asked).encode()
            own["content-type"] = "application/connect+json"
            ran = await side.http.post(
                "/process.Process/Start", content=len(body).to_bytes(5, "big") + body, headers=own
            )
            assert b"exit status 0" in ran.content
            if number % 3 == 0:
                side.clock.now += 51
                await side.boxes.expire()
                continue
            if number % 3 == 1:
                await side.http.post(f"/sandboxes/{box.id}/pause", json={})
            await side.http.delete(f"/sandboxes/{box.id}")
        assert (side.boxes.num_alive, box.account.num_live) == (0, 0)
        del box
        assert held() - before == Counter({"CreatedSandbox": 50})

    served(test)


def test_a_server_about_to_end_makes_no_new_machines_and_waits_for_those_there_are():
    async def test(side):
        made = (await side.make()).json()["sandboxID"]
        drained = asyncio.create_task(side.boxes.drain(20.0))
        await asyncio.sleep(0)
        refused = await side.make()
        assert (refused.status_code, refused.headers["should-retry"]) == (503, "true")
        assert not drained.done()
        assert (await side.http.delete(f"/sandboxes/{made}")).status_code == 204
        await asyncio.wait_for(drained, 100)

    served(test)


def test_a_runtime_is_the_service_that_e2bs_variables_name():
    variables = {"E2B_API_KEY": ALICE, "E2B_API_URL": "http://127.0.0.1:3000/"}
    assert RemoteRuntime.of_environment(variables).url == "http://127.0.0.1:3000"
    by_domain = RemoteRuntime.of_environment({"E2B_API_KEY": ALICE, "E2B_DOMAIN": "machines.example"})
    assert by_domain.url == "https://api.machines.example"
    for missing in ({}, {"E2B_API_KEY": ALICE}, {"E2B_API_URL": "http://127.0.0.1:3000"}):
        with pytest.raises(MachineError, match="is not configured"):
            RemoteRuntime.of_environment(missing)


@pytest.mark.parametrize("given", [{}, {"x-access-token": "wrong"}, {"authorization": "Bearer x"}])
def test_a_machines_inside_needs_its_own_token(given):
    async def test(side):
        made = (await side.make(templateID="tpl")).json()
        headers = {"e2b-sandbox-id": made["sandboxID"]} | given
        listed = await side.http.post("/process.Process/List", json={}, headers=headers)
        read = await side.http.get("/files?path=hi.txt", headers=headers)
        assert (listed.status_code, read.status_code) == (401, 401)
        good = headers | {"x-access-token": made["envdAccessToken"]}
        assert (await side.http.get("/files?path=hi.txt", headers=good)).content == b"hi"
        other = (await side.make()).json()
        crossed = good | {"e2b-sandbox-id": other["sandboxID"]}
        assert (await side.http.get("/files?path=hi.txt", headers=crossed)).status_code == 401

    served(test)


def test_a_user_that_cannot_be_read_and_a_bound_that_is_none_are_refused():
    async def test(side):
        made = (await side.make(templateID="tpl")).json()
        own = {"e2b-sandbox-id": made["sandboxID"], "x-access-token": made["envdAccessToken"]}
        for bad in ({"authorization": "Basic ???"}, {"etude-exactly": "-1"}, {"etude-exactly": "9" * 30}):
            assert (await side.http.get("/files?path=hi.txt", headers=own | bad)).status_code == 400
        sent = await side.http.post("/files?path=a", headers=own | {"authorization": "Basic ?"}, files={"file": b"x"})
        assert sent.status_code == 400

    served(test)


def test_a_machine_is_named_by_its_host_as_well():
    async def test(side):
        made = (await side.make(templateID="tpl")).json()
        headers = {"host": f"49983-{made['sandboxID']}.machines.example", "x-access-token": made["envdAccessToken"]}
        assert (await side.http.get("/files?path=hi.txt", headers=headers)).content == b"hi"
        for host in ("machines.example", headers["host"].replace("49983", "8080")):
            assert (await side.http.get("/files?path=hi.txt", headers=headers | {"host": host})).status_code == 400

    served(test)


def test_content_and_encodings_that_are_not_spoken_are_refused_by_name():
    async def test(side):
        made = (await side.make()).json()
        own = {"e2b-sandbox-id": made["sandboxID"], "x-access-token": made["envdAccessToken"]}
        for path, kind in (
            ("List", "application/proto"),
            ("Start", "application/connect+proto"),
            ("Start", "text/plain"),
        ):
            headers = own | {"content-type": kind}
            answer = await side.http.post(f"/process.Process/{path}", content=b"", headers=headers)
            assert (answer.status_code, kind in answer.text) == (415, True)

    served(test)


MESSAGES = {
    "process.Process/Start": {
        "process": {"cmd": "python", "args": ["a.py"], "envs": {"A": "b"}, "cwd": "x"},
        "stdin": False,
    },
    "process.Process/Connect": {"process": {"pid": 1}},
    "process.Process/StreamInput": {"start": {"process": {"tag": "t"}}, "data": {"input": {"stdin": "eA=="}}},
    "process.Process/List": {},
    "process.Process/SendInput": {"process": {"pid": 1}, "input": {"stdin": "eA=="}, "etudeOffset": 3},
    "process.Process/SendSignal": {"process": {"pid": 1}, "signal": "SIGNAL_SIGKILL"},
    "process.Process/Update": {"process": {"pid": 1}, "pty": {"size": {"cols": 80, "rows": 24}}},
    "filesystem.Filesystem/Stat": {"path": "x"},
    "filesystem.Filesystem/ListDir": {"path": "x", "depth": 1},
    "filesystem.Filesystem/Move": {"source": "x", "destination": "y"},
    "filesystem.Filesystem/CreateWatcher": {"path": "x", "recursive": True},
    "filesystem.Filesystem/GetWatcherEvents": {"watcherId": "x"},
}
STREAMING = ("Start", "Connect", "StreamInput")
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@given(st.data())
@settings(max_examples=60)
def test_every_request_to_a_machine_is_answered_or_refused_by_name(data):
    name = data.draw(st.sampled_from(sorted(MESSAGES)))
    message: Any = json.loads(json.dumps(MESSAGES[name]))
    at = message
    while isinstance(at, dict) and at:  # one field, however deep, has another value
        field = data.draw(st.sampled_from(sorted(at)))
        if not isinstance(at[field], dict) or data.draw(st.booleans()):
            at[field] = data.draw(JSON)
            break
        at = at[field]
    body = bytearray(json.dumps(message).encode())
    if data.draw(st.booleans()):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    is_stream = name.endswith(STREAMING)
    sent = len(body).to_bytes(5, "big") + bytes(body) if is_stream else bytes(body)

    async def test(side):
        made = (await side.make()).json()
        headers = {
            "e2b-sandbox-id": made["sandboxID"],
            "x-access-token": made["envdAccessToken"],
            "content-type": "application/connect+json" if is_stream else "application/json",
            "connect-timeout-ms": "30",  # machines in memory have no shell that would answer
        }
        answer = await side.http.post(f"/{name}", content=sent, headers=headers)
        assert answer.status_code in (200, 400, 403, 404, 409, 429, 501, 504), answer.text
        if is_stream:
            assert b"code" in answer.content or b"start" in answer.content
        elif answer.status_code != 200:
            assert answer.json()["code"] in set(Code)

    served(test)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "[a]\nkey = 3",
        '[a]\nkey = "short"',
        f'[a]\nkey = "{ALICE}"\nmax = 3',
        f'[a]\nkey = "{ALICE}"\n[b]\nkey = "{ALICE}"',
    ],
)
def test_a_file_of_keys_that_is_none_is_refused(tmp_path: Path, text: str):
    path = tmp_path / "keys.toml"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(ConfigError):
        Keyring.read(path)


def test_a_file_of_keys_that_others_may_read_is_refused(tmp_path: Path):
    path = tmp_path / "keys.toml"
    path.write_text(f'[alice]\nkey = "{ALICE}"\nmax_live = 2\n')
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="other users have access to it"):
        Keyring.read(path)
    path.chmod(0o600)
    account = Keyring.read(path).account(ALICE)
    assert account is not None
    assert (account.name, account.quota.max_live) == ("alice", 2)


def test_templates_are_folders_and_images_by_name(tmp_path: Path):
    (tmp_path / "tree" / "sub").mkdir(parents=True)
    (tmp_path / "tree" / "sub" / "a.txt").write_text("a")
    path = tmp_path / "templates.toml"
    path.write_text('[one]\nfiles = "tree"\n[two]\nimage = "9f3c"\nworkdir = "/testbed"\n')
    found = read_templates(path)
    assert found["one"].files == {"sub/a.txt": b"a"}
    assert found["two"].image is not None
    assert found["two"].image.workdir == "/testbed"
    path.write_text('[one]\nfiles = "absent"\n')
    with pytest.raises(ConfigError, match="is not a folder"):
        read_templates(path)
