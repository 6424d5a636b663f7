"""``etude harness check`` on programs that are trained well, and on some that are not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from etude import cli as etude
from etude.cli.harness import Script, _read_answers
from etude.errors import InputError
from etude.harness import Call
from etude.harness.commands import Parameter, Signature
from etude.models.config import ModelConfig

AGENT = Path(__file__).parents[3] / "examples" / "command" / "agent.py"
CONFIG = """
[machines]
require_memory_bound = false
[harness]
max_turns = 4
turn_tokens = 48
context_tokens = 480
rollout_deadline_s = 20.0
[harness.program]
kind = "command"
argv = {argv}
"""


@pytest.fixture
def check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    def run(argv: list[str], *more: str) -> tuple[int, str]:
        config = tmp_path / "config.toml"
        config.write_text(CONFIG.format(argv=json.dumps(argv)))
        code = etude.main(["harness", "check", str(config), *more])
        out, err = capsys.readouterr()
        return code, out + err

    return run


def test_a_program_that_asks_and_submits_is_shown_as_a_tree(check: Callable[..., tuple[int, str]]) -> None:
    code, said = check(["{python}", str(AGENT)])
    assert code == 0, said
    assert "ended: submitted; 2 turns in 1 conversation; " in said
    assert "\n  conversation 1\n    0 act  prompt " in said
    assert "\n    1 act  prompt " in said
    assert "\n        [call] submit\n" in said
    assert 'sampling asked: {"temperature": 0.2}' in said
    assert "notice: the model never reads: tool 'edit'" in said  # etude's own template lists no tools


def test_a_program_that_asks_nothing_fails_the_check(check: Callable[..., tuple[int, str]]) -> None:
    code, said = check(["{python}", "-c", "print('hello')"])
    assert code == 1
    assert "problem: the program sent no request to the model" in said
    assert "| hello" in said


CHATTING = """
import json, os, sys, urllib.error, urllib.request
def post(messages, path="/chat/completions", **more):
    body = json.dumps({"model": "m", "messages": messages, **more}).encode()
    headers = {"content-type": "application/json", "authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    asked = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + path, body, headers)
    try:
        return json.load(urllib.request.urlopen(asked))["choices"][0]["message"]
    except urllib.error.HTTPError as error:
        print("status", error.code)
def turns(num, system="be brief", keep=True):
    talk = [{"role": "user", "content": "begin"}]
    for turn in range(num):
        said = post([{"role": "system", "content": system.format(turn=turn)}, *talk])
        talk += [said] if keep and said else []
        talk += [{"role": "user", "content": f"go on {turn}"}]
def wrote(status):
    open("last.json", "w").write(json.dumps({"status": status}))
"""
STATUS = [
    'harness.program.status={file = "last.json", field = "status"}',
    'harness.program.endings={Done = "submitted", Limit = "turns"}',
]


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("turns(3, 'it is {turn} o clock')", ["turns [1, 2] do not continue any", "(3 sampled replies", "a time, a"]),
        (
            "real = post; post = lambda m: real(m) and dict(role='assistant', content='well')\n"
            "turns(3, 'it is {turn} o clock')",
            ["turns [1, 2] do not continue any earlier turn of the model\n"],
        ),
        ("turns(2, keep=False)", ["turns [1] do not continue any", "changed or dropped"]),
        (
            "post([], '/chat/completion')",
            ["problem: 1 request was refused: 404 POST /v1/chat/completion: ", "{base_url}"],
        ),
        ("turns(1); post([{'role': 'usr'}])", ["problem: 1 request was refused: 400 POST /v1/chat/completions: "]),
        ("turns(1); sys.exit(3)", ["problem: the program failed: exit code 3"]),
        ("turns(1); wrote('Confused')", ['problem: the program failed: status = "Confused"', "ended: stopped"]),
        ("turns(1); __import__('time').sleep(30)", ["problem: the program was killed at its deadline"]),
    ],
)
def test_what_keeps_a_program_from_being_trained_is_named_and_fails_the_check(
    check: Callable[..., tuple[int, str]], body: str, says: list[str]
) -> None:
    deadline_s = 3.0 if "sleep" in body else 20.0
    sets = [f"harness.rollout_deadline_s={deadline_s}", *(STATUS if "wrote" in body else [])]
    code, said = check(["{python}", "-c", CHATTING + body], *(part for one in sets for part in ("--set", one)))
    assert code == 1, said
    assert all(one in said for one in says), said
    assert "sent no request" not in said
    assert "no problem found" not in said


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("turns(1)", "; 1 turn in 1 conversation; "),
        ("turns(2)", "; 2 turns in 1 conversation; "),
        ("turns(1); turns(1, 'another agent')", "conversation 2: begins with another message"),
        ("turns(6)", "notice: 2 requests came after the end of the rollout and got status 403: harness.max_turns = 4"),
    ],
)
def test_what_can_be_trained_is_no_problem(check: Callable[..., tuple[int, str]], body: str, says: str) -> None:
    code, said = check(["{python}", "-c", CHATTING + body])
    assert code == 0, said
    assert says in said
    assert "no problem found" in said


def test_a_limit_of_the_programs_own_is_shown_as_what_it_is(check: Callable[..., tuple[int, str]]) -> None:
    sets = [part for one in STATUS for part in ("--set", one)]
    code, said = check(["{python}", "-c", CHATTING + "turns(1); wrote('Limit')"], *sets)
    assert code == 0, said
    assert "ended: turns; 1 turn" in said
    assert 'notice: the program ended by its own limit, as turns: status = "Limit"' in said
    assert "ended: submitted" in check(["{python}", "-c", CHATTING + "turns(1); wrote('Done')"], *sets)[1]


def test_a_nearly_right_word_in_braces_is_an_error(check: Callable[..., tuple[int, str]]) -> None:
    code, said = check(["{python}", "{cdw}/agent.py"])
    assert code == 2
    assert "'{cdw}/agent.py' has the unknown word {cdw}" in said
    assert "did you mean {cwd}?" in said
    code, said = check(["sh", "-c", "models=a; echo ${models}; echo b | awk '{print}'; echo '{task} {python}'"])
    assert "| a\n  | b\n  | {task} /" in said, "other words in braces stay"


def test_a_script_of_answers_is_said_in_order(check: Callable[..., tuple[int, str]], tmp_path: Path) -> None:
    answers = tmp_path / "answers"
    answers.write_text('"let me see"\n{"name": "submit", "arguments": {}}\n')
    code, said = check(["{python}", str(AGENT)], "--answers", str(answers))
    assert code == 0, said
    assert "[assistant] let me see\n" in said
    answers.write_text('"fine"\n\nno json')
    code, said = check(["{python}", str(AGENT)], "--answers", str(answers))
    assert code == 2
    assert f"line 3 of {answers} is not a scripted answer" in said
    assert 'hint: write one JSON value a line: "a text", or {"name": "run"' in said


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"name": "bash"}', "line 1 of {}: arguments is missing"),
        ('{"arguments": {}}', "line 1 of {}: name is missing"),
        ('{"name": 3, "arguments": {}}', "name is a number, expected a text"),
        ('{"name": "bash", "arguments": "ls"}', "arguments is a text, expected an object"),
        ('{"name": "bash", "arguments": 3}', "arguments is a number, expected an object"),
        ('{"name": "bash", "arguments": ["ls"]}', "arguments is a list, expected an object"),
        ("true", "it is true or false, expected a text or an object"),
        ("[" * 100_000, "is not a scripted answer"),
        ("\n", "has no answers: it is empty"),
    ],
)
def test_an_answer_in_another_form_is_told_what_is_wrong(tmp_path: Path, line: str, says: str) -> None:
    path = tmp_path / "answers"
    path.write_text(line)
    with pytest.raises(InputError) as refused:
        _read_answers(path)
    assert says.replace("of {}", f"of {path} is not a scripted answer") in str(refused.value)


def test_a_scripted_call_with_other_arguments_than_the_tools_is_a_problem(tmp_path: Path) -> None:
    run = Signature("run", "", (Parameter("command"), Parameter("wait", required=False)))
    schema = {"properties": {}, "additionalProperties": True}
    free = Signature.from_openai({"type": "function", "function": {"name": "free", "parameters": schema}})
    calls = [
        Call("run", {"command": "ls"}),
        Call("run", {"cmd": "ls", "dir": "."}),
        Call("run", {"wait": "1"}),
        Call("free", {"any": 1}),
    ]
    script = Script(tmp_path, list(enumerate(calls, 1)))
    for _ in calls:
        script.answer("begin", {"run": run, "free": free})
    assert [one.what.removeprefix("line ") for one in script.problems] == [
        f"2 of {tmp_path} calls 'run' with the unknown arguments cmd, dir and without the required argument command",
        f"3 of {tmp_path} calls 'run' without the required argument command",
    ]
    assert script.problems[0].hint == "usage: run COMMAND WAIT"


def test_a_task_that_does_not_exist_is_bad_input(check: Callable[..., tuple[int, str]]) -> None:
    code, said = check(["true"], "--task", "-1")
    assert code == 2
    assert "--task -1 is no task of the split train: indices start at 0" in said


def test_a_start_is_refused_as_by_run(check: Callable[..., tuple[int, str]], tmp_path: Path) -> None:
    start = ["--set", f"start={json.dumps(str(tmp_path))}"]
    (tmp_path / "config.json").write_text(json.dumps(ModelConfig(context_tokens=512).to_hf()))
    code, said = check(["true"], *start, "--set", "harness.context_tokens=100000")
    assert code == 2
    assert "harness.context_tokens = 100000 is too large: the checkpoint has positions for 512" in said
    (tmp_path / "config.json").unlink()
    (tmp_path / "run.json").write_text("{}")
    code, said = check(["true"], *start)
    assert code == 2
    assert "is not a checkpoint: it has no config.json; it is a run\n" in said
    assert f"hint: write its model with `etude export {tmp_path} DIR`, then set start = DIR" in said


def test_a_scripted_call_of_a_tool_that_is_not_offered_is_named_with_its_line(
    check: Callable[..., tuple[int, str]], tmp_path: Path
) -> None:
    answers = tmp_path / "answers"
    answers.write_text('"let me see"\n\n{"name": "subnit", "arguments": {}}\n{"name": "submit", "arguments": {}}\n')
    code, said = check(["{python}", str(AGENT)], "--answers", str(answers))
    assert code == 1, said
    what = f"problem: line 3 of {answers} calls 'subnit', a tool that the request does not offer\n"
    assert what + "  hint: did you mean 'submit'?\n" in said
    assert "line 4" not in said
    script = Script(answers, [(3, Call("subnit", {}))])
    script.answer("begin", {})
    assert script.problems[0].hint == "script a text: the request has no tools"
