"""Goal: templates print what they print under plain jinja2, and no template harms the server.

Method: ordinary templates beside jinja2's own sandbox, set up as models' authors use it; and a
collection of attacks on time, memory and secrets, each of which must end in an error within limits
that are counted, not timed.
"""

import json
import tracemalloc
from datetime import datetime

import jinja2
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2.sandbox import ImmutableSandboxedEnvironment

from phaseloop.text.budget import Budget, Limits, TemplateError
from phaseloop.text.sandbox import compile_template, run_template

NOW = datetime(2026, 1, 2, 3, 4, 5)  # noqa: DTZ001
SMALL = Limits(steps_max=6_000, volume_max=300_000)
MEMORY_MAX = 12 << 20  # bytes, some for the volume, more for what Python's objects weigh


def render(source, limits=SMALL, clock_ns=lambda: 0, **variables):
    code = compile_template(source, Budget(limits, clock_ns))
    return run_template(code, variables, Budget(limits, clock_ns), NOW)


def plain(source, **variables):
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda value, indent=None, **options: json.dumps(
        value, ensure_ascii=False, indent=indent, **options
    )
    environment.globals["strftime_now"] = NOW.strftime
    return environment.from_string(source).render(**variables)


VARIABLES = {
    "messages": [
        {"role": "user", "content": "Hi <b>ü"},
        {"role": "assistant", "content": "  yes\n"},
    ],
    "text": "one two  three",
    "numbers": [3, 1, 2],
    "nested": {"b": [1, {"c": None}], "a": True, "ü": 0.5},
    "none": None,
}
ORDINARY = [
    "{% for m in messages %}<{{ m.role }}>{{ m['content']|trim }}\n{% endfor %}",
    "{% for m in messages if m.role != 'user' %}{{ loop.index }}{{ loop.last }}"
    "{% else %}-{% endfor %}",
    "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.role }}"
    "{% break %}{% endfor %}",
    "{% set ns = namespace(n=0) %}{% for x in numbers %}{% set ns.n = ns.n + x %}"
    "{% endfor %}{{ ns.n }}",
    "{% macro f(x, y=2) %}[{{ x ~ y }}]{% endmacro %}{{ f(1) }}{{ f(text, y='!') }}",
    "{% macro f() %}({{ caller() }}){% endmacro %}{% call f() %}in{{ 1 }}{% endcall %}",
    "{% set x %}a{{ text }}b{% endset %}{{ x|upper }}|{{ x|length }}",
    "{% filter upper %}a{{ text }}{% endfilter %}",
    "{{ text.split() }} {{ text.split(' ', 1)[-1] }} {{ text.replace('o', '0', 1) }}",
    "{{ ', '.join(['a', text]) }} {{ ['a', 1]|join('-') }} {{ numbers|join }}",
    "{{ text[4:7] }} {{ text[::-1] }} {{ numbers[1:] }} {{ messages[-1]['role'] }}",
    "{{ text.strip().startswith('one') }} {{ text.rstrip('e').lstrip('o') }} {{ text.title() }}",
    "{{ nested }} {{ numbers }} {{ none }} {{ (1, 'a') }} {{ {'k': text} }} {{ missing }}",
    "{{ nested|tojson }} {{ nested|tojson(indent=2) }} {{ '<&>\"'|tojson }}",
    "{{ nested|dictsort }} {{ numbers|sort|first }} {{ numbers|sort(reverse=true) }}"
    " {{ numbers|max }}",
    "{{ messages|map(attribute='role')|list }}"
    " {{ messages|selectattr('role', 'equalto', 'user')|list }}",
    "{{ numbers|reject('odd')|list }} {{ ['b', 'a', 'b']|unique|list }} {{ numbers|reverse|list }}",
    "{{ nested.items()|list }} {{ nested.get('z', 'no') }} {{ nested|items|list }}"
    " {{ nested.keys() }}",
    "{{ 7 // 2 }} {{ 7 % 4 }} {{ 2 ** 8 }} {{ 7 / 2 }} {{ -3|abs }} {{ '3'|int + 1 }}"
    " {{ 'ab' * 3 }}",
    "{{ '%s-%05.1f-%d%%' % (text, 3.14159, 42) }} {{ '%s'|format(numbers) }}"
    " {{ '%(a)s' % {'a': 1} }}",
    "{{ '{} {0!r:>9} {x[1]}'.format(1, x=numbers) if false }}"
    "{{ '{:>5}|{:<4}|{a}'.format('x', 2, a=text) }}",
    "{{ '{a}'.format_map({'a': 1}) }} {{ '{0.role}'.format(messages[0]) if false }}",
    "{{ 'xaax'|trim('x') }} {{ none|trim }} {{ '0x1F'|int(base=16) }} {{ 'q'|int(7) }}",
    "{{ 'a\nb'|indent(2) }} {{ 'a\n\nb'|indent('> ', first=true) }} {{ text|wordcount }}",
    "{{ text is string }} {{ nested is mapping }} {{ none is none }}"
    " {{ missing is defined }} {{ 'a' in 'abc' }}",
    "{{ strftime_now('%d %b %Y') }} {{ range(3)|list }} {{ range(1, 9, 3) }}"
    " {{ dict(a=1, **{'b': 2}) }}",
    "{% for a, b in [(1, 2), (3, 4)] %}{{ a + b }}{{ loop.cycle('x', 'y') }}"
    "{{ loop.changed(a) }}{% endfor %}",
    "{% for x in nested recursive %}{{ x }}{{ loop([]) }}{% endfor %}",
    "{{ ([1] + [2, 3])|length }} {{ [1] * 3 }} {{ messages|length * 2 }} {{ [[]] == [[]] }}",
    "  {% if true %}\n    a\n  {% endif %}\n{#- note #} b {{- ' c' -}}  ",
]


@pytest.mark.parametrize("source", ORDINARY)
def test_ordinary_templates_print_as_under_plain_jinja(source):
    assert render(source, **VARIABLES) == plain(source, **VARIABLES)


def test_what_authors_need_beyond_it():
    assert render("{{ '{\"a\": [1]}'|from_json }}") == "{'a': [1]}"
    assert render("{{ '<b>'|safe ~ '<i>' }}{{ '<'|e }}") == "<b><i>&lt;"
    assert render("{% generation %}a{% set x = 1 %}{% endgeneration %}{{ x }}") == "a"
    assert render(
        "{{ [1]|tojson(separators=(',', ':')) }}{{ {'b': 1, 'a': 2}|tojson(sort_keys=true) }}"
    ) == ('[1]{"a": 2, "b": 1}')


DOUBLED = "{% set x = 'aaaaaaaa' %}" + "{% set x = EXPRESSION %}" * 60 + "{{ x|length }}"
ATTACKS = {
    "loops in loops": "{% for a in range(999) %}{% for b in range(999) %}{% endfor %}{% endfor %}",
    "a loop that prints": "{% for a in range(99999) %}" + "text" * 100 + "{% endfor %}",
    "a test that rejects": "{% for a in range(99999) if a == -1 %}{% endfor %}" * 9,
    "a loop into itself": "{% for a in [1, 2] recursive %}{{ loop([1, 2]) }}{% endfor %}",
    "a macro without end": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "a macro that branches": "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}"
    "{% endmacro %}{{ f(60) }}",
    "a block without end": "{% block a %}{{ self.a() }}{% endblock %}",
    "times": "{{ ('a' * 1000000000)|length }}",
    "times, a list": "{{ ([1] * 1000000000)|length }}",
    "times, from the left": "{{ (1000000000 * 'a')|length }}",
    "doubled by ~": DOUBLED.replace("EXPRESSION", "x ~ x"),
    "doubled by +": DOUBLED.replace("EXPRESSION", "x + x"),
    "doubled by *": DOUBLED.replace("EXPRESSION", "x * 2"),
    "doubled by replace": DOUBLED.replace("EXPRESSION", "x.replace('a', 'aa')"),
    "doubled by |replace": DOUBLED.replace("EXPRESSION", "x|replace('a', 'aa')"),
    "doubled between all": DOUBLED.replace("EXPRESSION", "x.replace('', 'aa')"),
    "doubled by join": DOUBLED.replace("EXPRESSION", "x.join([x, x])"),
    "doubled by |join": DOUBLED.replace("EXPRESSION", "[x, x]|join(x)"),
    "doubled by format": DOUBLED.replace("EXPRESSION", "'{0}{0}{0}'.format(x)"),
    "doubled by format_map": DOUBLED.replace("EXPRESSION", "'{a}{a}'.format_map({'a': x})"),
    "doubled by %": DOUBLED.replace("EXPRESSION", "'%s%s' % (x, x)"),
    "doubled by % of names": DOUBLED.replace("EXPRESSION", "'%(a)s%(a)s' % {'a': x}"),
    "doubled by |format": DOUBLED.replace("EXPRESSION", "'%s%s'|format(x, x)"),
    "doubled by |indent": DOUBLED.replace("EXPRESSION", "(x ~ '\n' ~ x)|indent(900)"),
    "doubled by tojson": DOUBLED.replace("EXPRESSION", "[x, x]|tojson"),
    "doubled by |string": DOUBLED.replace("EXPRESSION", "[x, x]|string"),
    "doubled by |e": DOUBLED.replace("EXPRESSION", "(x ~ '&&&&')|e|e"),
    "doubled by set": "{% set x = 'aa' %}" + "{% set x %}{{ x }}{{ x }}{% endset %}" * 60,
    "doubled by a macro": "{% macro f(x) %}{{ x }}{{ x }}{% endmacro %}{% set x = 'aa' %}"
    + "{% set x = f(x) %}" * 60,
    "doubled by a filter block": "{% set x = 'a' %}"
    + "{% set x %}{% filter upper %}{{ x }}{{ x }}{% endfilter %}{% endset %}" * 60,
    "nested lists, printed": "{% set x = [1] %}" + "{% set x = [x, x] %}" * 60 + "{{ x }}",
    "nested lists, compared": "{% set x = [1] %}{% set y = [1] %}"
    + "{% set x = [x, x] %}{% set y = [y, y] %}" * 60
    + "{{ x == y }}",
    "nested tuples, as a key": "{% set x = (1,) %}" + "{% set x = (x, x) %}" * 60 + "{{ {x: 1} }}",
    "nested mappings": "{% set x = {} %}"
    + "{% set x = {'a': x, 'b': x} %}" * 60
    + "{{ x|tojson }}",
    "nested by dict": "{% set x = {} %}" + "{% set x = dict(a=x, b=x) %}" * 60 + "{{ x|tojson }}",
    "in namespaces": "{% set x = 1 %}" + "{% set x = namespace(a=x, b=x) %}" * 60 + "{{ x }}",
    "a power": "{{ 9 ** 9 ** 9 }}",
    "products": "{% set x = 9 %}" + "{% set x = x * x %}" * 60 + "{{ x }}",
    "a long range": "{{ range(1000000000)|list }}",
    "a wide field": "{{ '{:>1000000000}'.format(1) }}",
    "a wide field from outside": "{{ '{:{w}}'.format(1, w=1000000000) }}",
    "a wide % field": "{{ '%1000000000d' % 1 }}",
    "a wide % field from outside": "{{ '%*d' % (1000000000, 1) }}",
    "a precise % field": "{{ '%.1000000000f' % 1 }}",
    "a wide indent": "{{ 'a\nb'|indent(1000000000) }}",
    "a wide tojson": "{{ [1]|tojson(indent=1000000000) }}",
    "padding": "{{ 'a'.ljust(1000000000) }}",
    "tabs": "{{ '\t'.expandtabs(1000000000) }}",
    "centred": "{{ 'a'|center(1000000000) }}",
    "batches": "{{ [1]|batch(1000000000, 0)|list }}",
    "filler": "{{ lipsum(1000000) }}",
    "a wide and deep tojson": "{% set x = [1] * 90 %}"
    + "{% set x = [x] %}" * 90
    + "{{ x|tojson(indent=900) }}",
    "many long comparisons": "{{ ('a' * 90000) ~ 'b' in [('a' * 90000) ~ 'c'] * 90000 }}",
    "long lists compared": "{{ ['a' * 90000 ~ 'b'] * 9000 == ['a' * 90000 ~ 'b'] * 9000 }}",
    "a comparison as a test": "{{ ['a' * 90000 ~ 'b'] * 9000 is eq(['a' * 90000 ~ 'b'] * 9000) }}",
    "a comparison of a loop": "{% for x in [1, 2] %}"
    "{{ loop.changed(['a' * 90000 ~ 'b'] * 9000) }}{% endfor %}",
    "counting what is long": "{{ (['a' * 90000 ~ 'b'] * 9000).count('a' * 90000 ~ 'c') }}",
    "sorting what is long": "{{ (['a' * 90000 ~ 'b', 'a' * 90000 ~ 'c'] * 9000)|sort|first }}",
    "slices again and again": "{% set x = 'a' * 9000 %}"
    + "{% for a in range(99) %}{% set y = x[1:] %}{% endfor %}",
    "splits again and again": "{% set x = 'a ' * 4500 %}"
    + "{% for a in range(99) %}{% set y = x.split() %}{% endfor %}",
    "sorts again and again": "{% set x = 'ab' * 4500 %}"
    + "{% for a in range(99) %}{% set y = x|sort %}{% endfor %}",
    "lists again and again": "{% set x = 'ab' * 4500 %}"
    + "{% for a in range(99) %}{% set y = x|list %}{% endfor %}",
    "a search from behind": "{{ ('a' * 9000).rfind('a' * 2000 ~ 'b' ~ 'a' * 2000) }}",
    "many blanks to strip": "{{ ('a' * 9000).strip('b' * 4000 ~ 'a') }}",
    "many blanks to trim": "{{ ('a' * 9000)|trim('b' * 4000 ~ 'a') }}",
    "a number of many bits": "{{ ('f' * 9000)|int(base=16) // 3 }}",
    "numbers of one hash": "{{ range(0, 9999 * (2**61 - 1), 2**61 - 1)|unique|list|length }}",
    "a long date": "{{ strftime_now('%A' * 100000) }}",
    "another template": "{% include 'x' %}",
    "an import": "{% import 'x' as y %}",
    "a parent": "{% extends 'x' %}",
    "escaping": "{% autoescape true %}{{ '<' }}{% endautoescape %}",
    "a class": "{{ ''.__class__.__mro__ }}",
    "a class by item": "{{ ''['__class__'] }}" + "{{ ''['__class__'].x }}",
    "a class by format": "{{ '{0.__class__.x}'.format(1) }}",
    "the environment": "{{ self.__init__.__globals__ }}",
    "a macro's environment": "{% macro f() %}{% endmacro %}{{ f._environment.x }}",
    "a change": "{{ messages.append(1) }}",
    "a change by name": "{{ messages['clear']() }}",
    "an iterator's address": "{{ messages|map('upper') }}",
    "a function's address": "{{ range }}",
    "a method's address": "{{ 'a'.upper }}",
    "a macro's address": "{% macro f() %}{% endmacro %}{{ f }}",
    "an address in a list": "{{ [namespace()] }}",
    "an address in a join": "{{ [range, 1]|join }}",
    "an address by %": "{{ '%s' % range }}",
    "an address by format": "{{ '{}'.format(range) }}",
    "nobody's method": "{{ 1.5.hex() }}",
    "nothing": "{{ missing.attribute }}",
    "no such filter": "{{ 1|nothing_like_it }}",
    "no such test": "{{ 1 is nothing_like_it }}",
    "a wrong type": "{{ 1 + 'a' }}",
    "division by zero": "{{ 1 // 0 }}",
    "not closed": "{% if true %}",
    "not a template": "{{ }}",
    "deep parentheses": "{{ " + "(" * 5_000 + "1" + ")" * 5_000 + " }}",
    "deep lists": "{{ " + "[" * 5_000 + "]" * 5_000 + " }}",
    "deep conditions": "{% if 1 %}" * 500 + "{% endif %}" * 500,
    "a long sum": "{{ 1" + " + 1" * 5_000 + " }}",
    "a long number": "{{ " + "9" * 10_000 + " }}",
    "deep JSON": "{{ ('[' * 90000)|from_json }}",
    "a long source": "a" * (SMALL.source_length_max + 1),
}


@pytest.mark.parametrize("source", ATTACKS.values(), ids=ATTACKS)
def test_attacks_end_in_an_error_within_the_limits(source):
    tracemalloc.start()
    try:
        with pytest.raises(TemplateError) as caught:
            render(source, messages=["a"])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < MEMORY_MAX
    message = str(caught.value)
    assert message.startswith("chat template")
    assert len(message) < 700
    assert " at 0x" not in message
    assert not caught.value.refused


def test_the_clock_ends_a_run_too():
    """One that moves on with every look at it; so the number of steps decides, not the machine."""
    looks = iter(range(0, 1 << 40, 1 << 20))
    limits = Limits(time_ns_max=1 << 30)
    with pytest.raises(TemplateError, match=r"takes more than 1\.07374 s"):
        render("{% for a in range(99999) %}{% endfor %}", limits, lambda: next(looks))
    assert next(looks) >> 20 < 1_100


def test_a_long_but_ordinary_conversation_is_within_the_usual_limits():
    messages = [{"role": "user", "content": "word " * 40}] * 1_000
    source = (
        "{% for m in messages %}{% for n in messages[-3:] %}"
        "{{ m.content|trim ~ '\n' }}{% endfor %}{% endfor %}"
    )
    assert len(render(source, Limits(), messages=messages)) == 3_000 * 200


def test_errors_name_the_line():
    with pytest.raises(TemplateError, match=r"^chat template, line 3: 'nothing' is undefined"):
        render("a\n{% if true %}\n{{ nothing.at.all }}{% endif %}")
    with pytest.raises(TemplateError, match=r"^chat template, line 2: "):
        render("a\n{% for %}")
    with pytest.raises(
        TemplateError, match=r"^chat template, line 2: 5000 is|^chat template, line 2: more"
    ):
        render("\n{% for a in range(9999) %}{% for b in range(9) %}{% endfor %}{% endfor %}")


def test_a_template_may_refuse():
    with pytest.raises(TemplateError, match="line 1: roles must alternate") as caught:
        render("{{ raise_exception('roles must alternate') }}")
    assert caught.value.refused


def test_what_it_says_is_cut():
    with pytest.raises(TemplateError) as caught:
        render("{{ raise_exception('a' * 5000) }}")
    assert len(str(caught.value)) < 600


def test_a_run_leaves_nothing_behind():
    code = compile_template(
        "{% set ns = namespace(n=0) %}{% set ns.n = ns.n + 1 %}{{ ns.n }}", Budget(SMALL, lambda: 0)
    )
    runs = [run_template(code, {}, Budget(SMALL, lambda: 0), NOW) for _ in range(3)]
    assert runs == ["1", "1", "1"]


PIECES = st.sampled_from(
    [
        *("{{", "}}", "{%", "%}", "{#", "#}", "-", " ", "\n", "x", "'a'", "1", "[", "]", "(", ")"),
        *("if x", "else", "endif", "for y in x", "endfor", "set x = 1", "macro f()", "endmacro"),
        *("|", "upper", "tojson", "~", "+", "*", ".", ",", "loop", "messages", "set x", "endset"),
        *("{% for y in x %}", "{% endfor %}", "{{ x }}", "{% if x %}", "{% endif %}", "{{ f() }}"),
    ]
)


@given(st.lists(PIECES, max_size=14).map("".join))
def test_any_source_renders_or_is_refused_as_by_jinja(source):
    """What plain jinja2 prints comes out, but for what has no text that is always the same."""
    variables = {"x": ["p", "q"], "messages": []}
    try:
        expected = plain(source, **variables)
    except Exception as error:  # jinja2 raises what it likes
        expected = error
    try:
        assert render(source, **variables) == expected
    except TemplateError as error:
        assert isinstance(expected, Exception) or "prints a value" in str(error)


def test_the_template_class_is_jinjas_own():
    """The sandbox stands on how jinja2 compiles; a new major version must be looked at first."""
    assert jinja2.__version__.startswith("3.1.")
