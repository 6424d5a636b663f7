"""Chat templates of checkpoints: the names that they get, and the limits on their work."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.harness.template import MAX_TEMPLATE_CHARS, ChatError, ChatTemplate, read_special, read_template

MESSAGES = [{"role": "user", "content": "größe <b>", "name": None}]
DOUBLED = "{% set ns = namespace(s=START) %}{% for i in range(60) %}{% set ns.s = AGAIN %}{% endfor %}"


def rendered(source: str, *, deadline_s: float = 0.3) -> str:
    return ChatTemplate(source, special={"bos_token": "<s>"}, deadline_s=deadline_s).render(MESSAGES)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ bos_token }}{{ eos_token }}", "<s>"),
        ("{{ messages[0] | tojson }}", '{"role": "user", "content": "größe <b>"}'),
        (
            "{{ messages[0].role | tojson(indent=1) }}{{ messages[0].content[:1] | tojson(ensure_ascii=true) }}",
            '"user""g"',
        ),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i ~ ',' }}{% endfor %}", "0,1,"),
        ("{% generation %}{{ 'x' * 3 }}{% endgeneration %}", "xxx"),
        ("{{ tools is none }}{{ documents is none }}{{ add_generation_prompt }}", "TrueTrueFalse"),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("{{ '%s-%02d' % ('a', 7) }}{{ '{}'.format(8) }}{{ '%s' | format(9) }}", "a-0789"),
        ("{{ messages | map(attribute='role') | join(',') }}{{ 'a-b'.replace('-', '+') }}", "usera+b"),
        ("{% macro f(x) %}[{{ x }}{{ caller() }}]{% endmacro %}{% call f(2) %}!{% endcall %}", "[2!]"),
    ],
)
def test_a_template_has_what_transformers_gives_it(source: str, text: str) -> None:
    assert rendered(source, deadline_s=30.0) == text


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a' * 10**9 }}",
        "{{ ['a'] * 10**9 }}",
        "{{ 9**9**9 }}",
        "{% set ns = namespace(x=10) %}{% for i in range(40) %}{% set ns.x = ns.x * ns.x %}{% endfor %}{{ ns.x }}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% for m in messages recursive %}{{ loop([m]) }}{% endfor %}",
        DOUBLED.replace("START", "'ab'").replace("AGAIN", "ns.s ~ ns.s") + "{{ ns.s }}",
        DOUBLED.replace("START", "'ab'").replace("AGAIN", "ns.s + ns.s") + "{{ ns.s }}",
        DOUBLED.replace("START", "[1]").replace("AGAIN", "[ns.s, ns.s]") + "{{ ns.s }}",
        DOUBLED.replace("START", "[1]").replace("AGAIN", "[ns.s, ns.s]") + "{{ ns.s | tojson }}",
        "{{ 'a'.center(10**9) }}{{ 'a' | center(1000000000) }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '%*d' % (1000000000, 1) }}",
        "{{ '{:1000000000}'.format(1) }}",
        "{{ ('a' * 100000).replace('a', 'b' * 100000) }}",
        "{{ messages | tojson(indent=100000000) }}",
        "{{ lipsum(n=100000) }}",
        "{{ range(1000000) }}",
        "{{ messages[0].missing.more }}",
        "{{ raise_exception('no') }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
    ],
)
def test_a_broken_or_hostile_template_is_an_error_with_a_hint(source: str) -> None:
    with pytest.raises(ChatError, match="chat template") as raised:
        rendered(source)
    assert raised.value.facts
    assert raised.value.hint


def test_a_template_that_does_not_compile_is_an_error() -> None:
    for source in ("{% for %}", "{{ 1 +", "{{ x | nofilter }}", "(" * 200_000 + "{{" + "(" * 5000):
        with pytest.raises(ChatError, match=r"does not compile|too long"):
            ChatTemplate(source)
    with pytest.raises(ChatError, match="too long"):
        ChatTemplate("x" * (MAX_TEMPLATE_CHARS + 1))


PIECES = [
    "{{", "}}", "{%", "%}", " for m in messages ", " endfor ", " if ", " endif ", " set x = ", "messages", "m.content",
    " ~ ", " * ", " | tojson ", " | join(", ")", "'a'", "9999", "[", "]", "(", " loop ", "\ue000", "x",
]  # fmt: skip


@settings(max_examples=150)
@given(st.lists(st.sampled_from(PIECES), max_size=14).map("".join))
def test_any_template_renders_or_raises_a_chat_error(source: str) -> None:
    try:
        assert isinstance(rendered(source), str)
    except ChatError as error:
        assert error.hint  # noqa: PT017


def test_a_checkpoints_files_name_its_template_and_its_tokens(tmp_path: Path) -> None:
    both = [{"name": "default", "template": "one"}, {"name": "tool_use", "template": "two"}]
    config = {"chat_template": both, "eos_token": {"content": "</s>"}, "bos_token": None}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": "old", "pad_token": "<pad>"}))
    assert read_template(tmp_path) == ("one", "two")
    assert read_special(tmp_path) == {"eos_token": "</s>", "pad_token": "<pad>"}
    (tmp_path / "chat_template.jinja").write_text("file")
    assert read_template(tmp_path) == ("file", None)
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(ChatError, match="is not UTF-8 text"):
        read_template(tmp_path)
