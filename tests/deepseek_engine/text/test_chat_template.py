import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from deepseek_engine.text import ChatTemplate, Tokenizer
from deepseek_engine.text.errors import TokenizerError
from hypothesis import given
from hypothesis import strategies as st
from piccard_contract.errors import ErrorCode, RequestError
from transformers import PreTrainedTokenizerFast

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
SPECIAL = {"bos_token": BOS, "eos_token": EOS}

# V2's turns, written as a template of several lines so that trimmed blocks matter.
V2 = """{{ bos_token }}
{%- for message in messages %}
    {%- if message.role == 'user' %}
{{- 'User: ' + message.content + '\\n\\n' }}
    {%- elif message.role == 'assistant' %}
{{- 'Assistant: ' + message.content + eos_token }}
    {%- elif message.role == 'system' %}
{{- message.content + '\\n\\n' }}
    {%- else %}
        {{- raise_exception('Only user, assistant and system roles are supported!') }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- 'Assistant:' }}
{%- endif %}"""

V2_TEMPLATE = ChatTemplate({"default": V2}, SPECIAL)

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Grüße! <b>2 & 2</b>?"},
    {"role": "assistant", "content": "<think>\nsum\n</think>\n\n4"},
    {"role": "user", "content": "再见"},
]


@pytest.fixture(scope="session")
def sources(v3_folder: Path) -> dict[str, str]:
    v3 = json.loads((v3_folder / "tokenizer_config.json").read_text(encoding="utf-8"))["chat_template"]
    opening = "{{'<｜Assistant｜>'}}{% endif %}"
    assert v3.endswith(opening)
    return {"v2": V2, "v3": v3, "r1": v3.removesuffix(opening) + "{{'<｜Assistant｜><think>\\n'}}{% endif %}"}


@pytest.fixture(scope="session")
def oracle(v3_folder: Path) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_file=str(v3_folder / "tokenizer.json"), **SPECIAL)


def render(source: str, messages: Any = CHAT, **variables: Any) -> str:
    return ChatTemplate({"default": source}, SPECIAL).render(messages, **variables)


@pytest.fixture(scope="session", params=["v2", "v3", "r1"])
def family(request, sources: dict[str, str], v3_folder: Path, tmp_path_factory) -> tuple[str, Tokenizer]:
    """A family's template, and the tokenizer of a checkpoint that brings it."""
    folder = tmp_path_factory.mktemp(request.param)
    (folder / "tokenizer.json").symlink_to(v3_folder / "tokenizer.json")
    config = {**SPECIAL, "add_bos_token": True, "chat_template": sources[request.param]}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return sources[request.param], Tokenizer.from_folder(folder)


@pytest.mark.parametrize("opened", [True, False], ids=["opened", "closed"])
@pytest.mark.parametrize("turns", [1, 2, 4])
def test_prompts_are_those_of_transformers(
    family: tuple[str, Tokenizer], oracle: PreTrainedTokenizerFast, opened: bool, turns: int
) -> None:
    source, tokenizer = family
    options = {"chat_template": source, "add_generation_prompt": opened}
    text = oracle.apply_chat_template(CHAT[:turns], tokenize=False, **options)
    assert tokenizer.chat_template.render(CHAT[:turns], add_generation_prompt=opened) == text
    ids = tokenizer.apply_chat_template(CHAT[:turns], add_generation_prompt=opened)
    assert ids == oracle.apply_chat_template(CHAT[:turns], return_dict=False, **options)
    assert ids.count(tokenizer.bos_token_id) == 1
    assert ids[0] == tokenizer.bos_token_id


def test_the_families_write_their_turns(sources: dict[str, str]) -> None:
    assert render(sources["v2"], CHAT[:2]) == f"{BOS}Be brief.\n\nUser: Grüße! <b>2 & 2</b>?\n\nAssistant:"
    assert render(sources["v3"]) == (
        f"{BOS}Be brief.<｜User｜>Grüße! <b>2 & 2</b>?<｜Assistant｜>\n\n4{EOS}<｜User｜>再见<｜Assistant｜>"
    )
    assert render(sources["r1"]).endswith("<｜Assistant｜><think>\n")


FEATURES = [
    "{{ messages | tojson }}",
    "{{ messages | tojson(indent=2) }}",
    "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
    "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ loop.last }}{{ loop.length }}{% endfor %}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n ~ bos_token }}",
    "  {% if true %}\n  x\n  {% endif %}\ny",
    "{% generation %}{{ messages[0].content }}{% endgeneration %}",
    "{{ strftime_now('%d %B %Y') }}",
    "{{ messages[-1]['content'].strip().upper() }}{{ unknown }}{{ pad_token is defined }}",
    "{% for m in messages[1:] | selectattr('role', 'equalto', 'user') %}{{ m.content | trim }}{% endfor %}",
    "{% macro turn(m) %}[{{ m.role }}]{% endmacro %}{% for m in messages | reverse %}{{ turn(m) }}{% endfor %}",
    "{% for k, v in messages[0].items() %}{{ k }}={{ v }},{% else %}none{% endfor %}",
    "{% for n in [[1], [2, [3]]] recursive %}<{{ loop(n) if n is iterable else n }}>{% endfor %}",
    "{{ 'a' * 3 }}{{ 2 ** 3 }}{{ [1] + [2] }}{{ '%s-%d' % ('a', 3) }}{{ range(3) | list }}",
    "{{ tools | tojson if tools else 'no tools' }}",
]


@pytest.mark.parametrize("source", FEATURES)
def test_features_of_hugging_face_templates(oracle: PreTrainedTokenizerFast, source: str) -> None:
    text = oracle.apply_chat_template(CHAT, chat_template=source, tokenize=False)
    assert render(source, add_generation_prompt=False) == text


@given(contents=st.lists(st.text(), min_size=1, max_size=4))
def test_any_content_is_passed_through(oracle: PreTrainedTokenizerFast, contents: list[str]) -> None:
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]
    options = {"chat_template": V2, "tokenize": False, "add_generation_prompt": True}
    assert V2_TEMPLATE.render(messages) == oracle.apply_chat_template(messages, **options)


def test_tool_calls_are_rendered(sources: dict[str, str]) -> None:
    call = {"type": "function", "function": {"name": "sky", "arguments": '{"at": "noon"}'}}
    messages = [
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "sunny"},
    ]
    text = render(sources["v3"], messages)
    assert 'sky\n```json\n{"at": "noon"}\n```' in text
    assert text.endswith("<｜tool▁output▁begin｜>sunny<｜tool▁output▁end｜><｜tool▁outputs▁end｜>")


def test_empty_tool_calls_are_no_tool_calls(sources: dict[str, str]) -> None:
    plain = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    for empty in (None, []):
        assert render(sources["v3"], [plain[0], {**plain[1], "tool_calls": empty}, plain[2]]) == render(
            sources["v3"], plain
        )


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages = [{"role": "user", "content": parts}]
    assert render("{{ messages[0].content }}", messages) == "one\ntwo"
    assert messages[0]["content"] is parts


BAD_MESSAGES = [
    (None, ErrorCode.INVALID_JSON, "list"),
    ({"role": "user", "content": "x"}, ErrorCode.INVALID_JSON, "an object"),
    ("hi", ErrorCode.INVALID_JSON, "a string"),
    ([], ErrorCode.MISSING_INPUT, "empty"),
    (["hi"], ErrorCode.INVALID_JSON, "messages[0]"),
    ([{"content": "x"}], ErrorCode.INVALID_VALUE, "messages[0].role"),
    ([{"role": "robot", "content": "x"}], ErrorCode.INVALID_VALUE, "'robot'"),
    ([{"role": ["user"], "content": "x"}], ErrorCode.INVALID_VALUE, "role"),
    ([{"role": "user"}], ErrorCode.INVALID_VALUE, "messages[0].content"),
    ([{"role": "user", "content": None}], ErrorCode.INVALID_VALUE, "missing"),
    ([{"role": "user", "content": 3}], ErrorCode.INVALID_VALUE, "a number"),
    ([{"role": "user", "content": [3]}], ErrorCode.INVALID_VALUE, "content[0]"),
    ([{"role": "user", "content": [{"type": "text"}]}], ErrorCode.INVALID_VALUE, "text"),
    ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], ErrorCode.UNSUPPORTED, "image_url"),
    ([{"role": "user", "content": "x", "tool_calls": [{}]}], ErrorCode.INVALID_VALUE, "tool_calls"),
    ([{"role": "assistant", "tool_calls": "x"}], ErrorCode.INVALID_VALUE, "tool_calls"),
    ([{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}], ErrorCode.INVALID_VALUE, "arguments"),
]


@pytest.mark.parametrize(("messages", "code", "hint"), BAD_MESSAGES, ids=[str(case[0]) for case in BAD_MESSAGES])
def test_bad_messages_are_named(messages: Any, code: ErrorCode, hint: str) -> None:
    with pytest.raises(RequestError) as caught:
        render(V2, messages)
    assert caught.value.code == code
    assert hint in caught.value.message


def test_a_checkpoint_without_a_template_says_to_send_text_input(make) -> None:
    tokenizer = make()
    assert not tokenizer.chat_template
    with pytest.raises(RequestError, match="text_input") as caught:
        tokenizer.apply_chat_template(CHAT)
    assert caught.value.code == ErrorCode.UNSUPPORTED


def test_what_a_template_refuses_is_told() -> None:
    tool = [{"role": "tool", "content": "x"}]
    with pytest.raises(RequestError, match="Only user, assistant and system roles") as caught:
        render(V2, tool)
    assert caught.value.code == ErrorCode.INVALID_VALUE


def test_values_that_a_template_cannot_take_are_told() -> None:
    with pytest.raises(RequestError, match="TypeError") as caught:
        render("{{ messages[0].content + extra }}", extra=3)
    assert caught.value.code == ErrorCode.INVALID_VALUE


@pytest.mark.parametrize("name", ["bos_token", "eos_token"])
def test_a_client_cannot_set_what_the_service_sets(name: str) -> None:
    with pytest.raises(RequestError, match=name) as caught:
        render(V2, **{name: "x"})
    assert caught.value.code == ErrorCode.INVALID_VALUE


def test_a_variable_may_have_the_name_of_an_argument() -> None:
    assert render("{{ messages[0].content }}", [{"role": "user", "content": "hi"}], self=1) == "hi"


def test_named_templates_and_files(tmp_path: Path, make) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with tools"}]
    tokenizer = make(tokenizer_config={"chat_template": named})
    assert tokenizer.chat_template.render(CHAT) == "plain"
    assert tokenizer.chat_template.render(CHAT, tools=[{"type": "function"}]) == "with tools"
    folder = tmp_path / "checkpoint"
    (folder / "chat_template.jinja").write_text("from a file", encoding="utf-8")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("tools from a file", encoding="utf-8")
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.chat_template.render(CHAT) == "from a file"
    assert tokenizer.chat_template.render(CHAT, tools=[{}]) == "tools from a file"


MALICIOUS = [
    "{{ ''.__class__.__mro__ }}",
    "{{ ''.__class__.__base__.__subclasses__() }}",
    "{{ cycler.__init__.__globals__ }}",
    "{{ raise_exception.__globals__.items() }}",
    "{{ '{0.__class__.__mro__}'.format('') }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update({'role': 'x'}) }}",
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% for a in range(10 ** 9) %}{% endfor %}",
    "{% macro f(n) %}{% for i in range(n) %}{{ f(n) }}{% endfor %}{% endmacro %}{{ f(9) }}",
    "{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}",
    "{% for i in range(9999) recursive %}{% if loop.depth < 4 %}{{ loop(range(9999)) }}{% endif %}{% endfor %}",
    "{{ 'x' * 10 ** 10 }}",
    "{{ 'x' * 10000000000 }}",
    "{{ [0] * 10000000000 }}",
    "{{ 9 ** 99999999 }}",
    "{{ 'x'.ljust(10000000000) }}",
    "{{ '%9999999999d' % 1 }}",
    "{% set ns = namespace(x='ab') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "{% set ns = namespace(x='ab') %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    # Filters and methods that pad, repeat or join.
    "{{ 'x' | center(10000000000) }}",
    "{{ (('x' * 999 + '\n') * 99) | indent(1000000) }}",
    "{{ ('x\n' * 999999) | indent('y' * 999999) }}",
    "{{ ('x' * 9999999) | replace('x', 'y' * 9999999) }}",
    "{{ ('x' * 9999999).replace('x', 'y' * 9999999) }}",
    "{{ ('x' * 9999999).replace('', 'y' * 9999999) }}",
    "{{ (['x' * 9999999] * 999999) | join('y' * 9999999) }}",
    "{{ ('y' * 9999999).join(['x'] * 999999) }}",
    "{{ range(99999) | map('center', 999999) | join }}",
    "{{ range(99999) | map('string') | map('center', 999999) | list }}",
    "{{ ('\t' * 999999).expandtabs(999999) }}",
    "{{ ('x' * 999999).translate({120: 'y' * 999999}) }}",
    "{{ '%99999999d' | format(1) }}",
    "{{ '%*d' % (99999999, 1) }}",
    "{{ '%(a)99999999d' % {'a': 1} }}",
    "{{ '{:>99999999}'.format(1) }}",
    "{{ '{:{w}}'.format(1, w='99999999') }}",
    "{{ ('{0}' * 99999).format('x' * 9999999) }}",
    "{{ ('%s' * 99999) % (('x' * 9999999,) * 99999) }}",
    "{{ strftime_now('%9999999999Y') }}",
    "{{ messages | tojson(indent=9999999) }}",
    "{{ range(99999) | map('string') | map('list') | sum(start=[]) }}",
    "{{ range(99999) | batch(9999999999, 'x') | list }}",
    "{{ [1] | slice(9999999999) | list }}",
    # Values that are small and endless: each list holds the last one twice.
    "{% set ns = namespace(x=[1]) %}{% for i in range(99) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
    "{% set ns = namespace(x=[1]) %}{% for i in range(99) %}{% set ns.x = ns.x + [ns.x] %}{% endfor %}{{ ns.x }}",
    "{% set ns = namespace(x={}) %}{% for i in range(99) %}{% set ns.x = {1: ns.x, 2: ns.x} %}{% endfor %}{{ ns.x }}",
    "{% set ns = namespace(x=[1]) %}{% for i in range(99) %}{% set ns.x = dict(a=ns.x, b=ns.x) %}{% endfor %}",
    # A little more each time, kept or not.
    "{% set ns = namespace(x=9) %}{% for i in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "{% set ns = namespace(x=[]) %}{% for i in range(9999) %}{% set ns.x = ns.x + ['x' * 9999999 ~ i] %}{% endfor %}",
    "{% set s = 'x' * 9999999 %}{% for i in range(9999) %}{% set y = s[1:] %}{% endfor %}",
    "{% set s = 'x' * 9999999 %}{% for i in range(9999) %}{{ s }}{% endfor %}",
    "{% for i in range(99999) %}" + "x" * 9999 + "{% endfor %}",
    "{% set y %}{% for i in range(99999) %}" + "x" * 9999 + "{% endfor %}{% endset %}",
    "{% set s = 'x' * 9999999 %}{{ " + " ~ ".join(["s"] * 99) + " }}",
    "{% macro f(n) %}{{ f(n) }}{{ f(n) }}{% endmacro %}{{ f(1) }}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(99) }}",
]


@pytest.mark.parametrize("source", MALICIOUS)
def test_malicious_templates_end_in_an_error(monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    # Smaller than a service's, so that the tests end soon; what stops them is the same.
    monkeypatch.setattr("deepseek_engine.text.template_budget.MAX_PASSES", 100_000)
    monkeypatch.setattr("deepseek_engine.text.template_budget.MAX_BYTES", 2**27)
    with pytest.raises(RequestError, match="what a template may not") as caught:
        render(source)
    assert caught.value.code == ErrorCode.UNSUPPORTED


@pytest.mark.parametrize("source", ["{% include '/etc/hostname' %}", "{{ lipsum(n=9) }}", "{{ self.x() }}"])
def test_templates_reach_nothing_outside(source: str) -> None:
    with pytest.raises(RequestError) as caught:
        render(source)
    assert caught.value.code == ErrorCode.INVALID_VALUE


@pytest.mark.parametrize("name", ["pprint", "urlize", "wordwrap", "xmlattr", "striptags", "random"])
def test_filters_that_no_chat_needs_are_not_there(name: str) -> None:
    with pytest.raises(TokenizerError, match=name):
        ChatTemplate({"default": f"{{{{ messages | {name} }}}}"}, SPECIAL)


def test_a_source_that_no_chat_needs_is_refused() -> None:
    with pytest.raises(TokenizerError, match="mend or remove"):
        ChatTemplate({"default": "x" * 2**21}, SPECIAL)
    with pytest.raises(TokenizerError, match="mend or remove"):
        ChatTemplate({"default": "{{ " + "[" * 9999 + "]" * 9999 + " }}"}, SPECIAL)


def test_a_template_runs_out_of_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepseek_engine.text.template_budget.MAX_SECONDS", -1.0)
    with pytest.raises(RequestError, match="it runs for more than"):
        render("{% for m in messages %}{{ m.content }}{% endfor %}")


def test_what_a_template_says_is_not_long() -> None:
    with pytest.raises(RequestError) as caught:
        render("{{ raise_exception('x' * 99999) }}")
    assert len(caught.value.message) < 700
    with pytest.raises(RequestError, match="refuses these messages: 3"):
        render("{{ raise_exception(3) }}")
    with pytest.raises(RequestError) as caught:
        render("{{ {}['x' * 99999] + 1 }}")
    assert len(caught.value.message) < 700


def test_long_chats_are_within_the_budget(sources: dict[str, str]) -> None:
    turns = [{"role": ("user", "assistant")[i % 2], "content": "word " * 20} for i in range(9999)]
    for source in sources.values():
        assert render(source, turns).count("word") == 9999 * 20
    accumulated = "{% set ns = namespace(x='') %}{% for m in messages %}{% set ns.x = ns.x ~ m.content %}{% endfor %}"
    assert len(render(accumulated + "{{ ns.x }}", turns[:999])) == 99900


def test_threads_have_budgets_of_their_own() -> None:
    template = ChatTemplate({"default": "{% for i in range(90000) %}{% endfor %}done"}, SPECIAL)
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda _: template.render(CHAT), range(24))) == ["done"] * 24


def test_the_budget_is_that_of_one_rendering() -> None:
    template = ChatTemplate({"default": "{% for i in range(99999) %}{% endfor %}done"}, SPECIAL)
    assert [template.render(CHAT) for _ in range(12)] == ["done"] * 12
