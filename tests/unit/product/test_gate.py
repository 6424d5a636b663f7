"""The suite of the product's gate, graded in real machines."""

from __future__ import annotations

import asyncio
from pathlib import Path

from examples.product import edits
from examples.product.edits import LINE, Answer, Kind, edited
from examples.product.tasks import Edits
from tests.here import opened

from etude.environments import MachineGrader, NamespaceRuntime
from etude.evals.suites import read_suite
from etude.records.rollout import Graded
from etude.records.task import Split


def test_neither_broken_calls_nor_questions_solve_a_task_of_the_gate_also_where_no_edit_can_be_right() -> None:
    settings = dict(read_suite(str(Path(edits.__file__).with_name("gate.toml"))).tasks["source"])
    assert settings.pop("kind") == "examples.product.tasks:Edits"
    source, split = Edits(**settings), Split.HELDOUT
    places = {hard: next(i for i in range(100) if source.request(split, i).hard is hard) for hard in (False, True)}

    async def grades(grader: MachineGrader, index: int) -> dict[str, float]:
        request, task = source.request(split, index), source.task(split, index)
        found = dict[str, float]()
        for name, text in (
            ("broken call or question", None),
            ("the same value again", f"return '{request.old}'"),
            ("no function any more", "return ("),
            ("another value", 'return "elsewhere"'),
            ("right", f"return '{request.new}'  # was {request.old}"),
        ):
            answer = Answer(Kind.BROKEN if text is None else Kind.EDIT, text or "", request.path, LINE)
            exports = {request.path: edited(request.file, answer).encode()}
            outcome = await grader.grade(task, source.answer(task), exports)
            assert isinstance(outcome, Graded)
            found[name] = outcome.grade
        return found

    async def main() -> dict[bool, dict[str, float]]:
        runtime = opened("namespace", lambda: NamespaceRuntime(spare=0))
        try:
            return {hard: await grades(MachineGrader(runtime), index) for hard, index in places.items()}
        finally:
            await runtime.close()

    found = asyncio.run(main())
    nothing = {"broken call or question": 0.0, "the same value again": 0.0, "no function any more": 0.0}
    assert found[False] == nothing | {"another value": 0.0, "right": 1.0}
    assert found[True] == nothing | {"another value": 1.0, "right": 1.0}
