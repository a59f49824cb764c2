"""Goal: policies and servers are compared by what their clients saw, and nothing invalid counts.

Method: figures of runs that are written down by hand; reads of streams that servers could send; and
the whole command, on the sim engine without time, with a second server beside it.
"""

import asyncio
import json

import msgspec
import pytest
from serve_process import SIM, ServeProcess

from phaseloop.cli import bench_policies
from phaseloop.cli.bench_policies_figures import (
    Taken,
    decode_rate,
    first_tokens,
    gaps,
    median_of,
    prefill_rate,
    same_answers,
    sample_of,
    union,
)
from phaseloop.cli.bench_policies_report import Report, as_html, rate_cells, sections
from phaseloop.cli.bench_policies_run import (
    Read,
    Rejected,
    Run,
    check_counters,
    check_reads,
    take_native,
    take_openai,
)
from phaseloop.cli.bench_policies_target import Server, Target, counters
from phaseloop.cli.bench_policies_work import Ask, asks_of, words_for
from phaseloop.cli.client import Address, ClientError, Event
from phaseloop.cli.errors import UserError
from phaseloop.cli.main import main
from phaseloop.sim.workload import read_workload

S = 1_000_000_000
HERE = Server("here", Address("127.0.0.1", 1, "", False), None, "native", "")
FAIR = Target("barrier-fair", HERE, {"policy": "barrier-fair"})
SMALL = """
[run]
seed = 3
[[stream]]
name = "chat"
arrivals = { kind = "poisson", per_s = 200, count = 6 }
prompt = { kind = "uniform", low = 20, high = 90 }
output = { kind = "uniform", low = 2, high = 9 }
[[request]]
name = "long"
prompt = 300
limit = 4
"""


def ask(number=0, *, at_ns=0, prompt_length=100, tokens=3, stream="chat") -> Ask:
    return Ask(number, stream, at_ns, prompt_length, tokens, None, None)


def read(*times_s, at_s=0.0, end="answered", number=0, prompt_length=100, stream="chat") -> Read:
    """One token at each of the times."""
    times = [round(time * S) for time in times_s]
    one = ask(
        number, at_ns=round(at_s * S), prompt_length=prompt_length, tokens=len(times), stream=stream
    )
    last = times[-1] if times and end == "answered" else None
    return Read(one, one.at_ns, times, [1] * len(times), list(range(len(times))), "x", last, end)


def workload_of(tmp_path, text):
    path = tmp_path / "work.toml"
    path.write_text(text)
    return path


# --- figures --------------------------------------------------------------------------------------


def test_overlapping_times_count_once():
    assert union([(0, 10), (5, 12), (20, 21), (20, 20)]) == 13
    assert union([]) == 0


def test_rates_are_tokens_over_the_time_in_which_they_were_due():
    """Prompts are waited for in 0..2 and 5..6 s, tokens flow in 2..4 and 6..8 s."""
    reads = [read(2, 3, 4), read(6, 7, 8, at_s=5, prompt_length=200)]
    assert prefill_rate(reads) == 300 / 3
    assert decode_rate(reads) == 4 / 4
    assert prefill_rate([]) is decode_rate([read(1)]) is None


def test_waits_count_from_the_planned_arrival_and_open_ones_to_the_cut():
    late = read(9, at_s=5)
    late.sent_ns = 7 * S
    silent, standing = read(at_s=4, end="cut"), read(1, 2, end="cut")
    reads = [late, silent, standing]
    assert first_tokens(reads, 10 * S).max == 6
    assert first_tokens(reads, 10 * S).p50 == 4
    assert gaps(reads, 10 * S).max == 8, "from its second token to the cut"


def test_a_sample_has_its_groups_and_its_occupancy():
    counted = {"phaseloop:decode_lane_seconds_total": 3.0, "phaseloop:decode_slot_seconds_total": 8}
    reads = (read(2, 3, 4), read(5, 9, at_s=1, stream="long"))
    sample = sample_of(Run(reads, 10 * S, 0, counted))
    assert (sample.makespan_s, sample.tokens_per_s) == (9, pytest.approx(5 / 9))
    assert sample.groups["chat"].gap_s.max == 1
    assert sample.groups["long"].ttft_s.max == 4
    assert sample.occupancy == 3 / 8


def test_answers_are_compared_by_tokens_where_both_tell_them():
    one, other = (sample_of(Run((read(1, 2),), S, 0, {})) for _ in range(2))
    assert same_answers(one, other) == (1, 1)
    changed = read(1, 2)
    changed.ids = [7, 8]
    assert same_answers(one, sample_of(Run((changed,), S, 0, {}))) == (0, 1)
    changed.ids = []  # such a server tells text alone, and the texts are equal
    assert same_answers(one, sample_of(Run((changed,), S, 0, {}))) == (1, 1)


# --- what counts ----------------------------------------------------------------------------------


def event(fields: object) -> Event:
    return Event(2 * S, msgspec.json.encode(fields))


def end_of(**changed):
    return event({"stop": True, "tokens_predicted": 3, "tokens_evaluated": 100, **changed})


def native_read() -> Read:
    one = Read(ask())
    for tokens in ([5], [6, 7]):
        assert not take_native(one, event({"content": "ab", "tokens": tokens, "stop": False}), S)
    return one


def test_a_native_stream_is_read_to_its_end():
    one = native_read()
    assert take_native(one, end_of(phaseloop={"queue_ms": 2.5, "policy": "quantum"}), S)
    assert (one.tokens, one.counts, one.ids, one.text) == (3, [1, 2], [5, 6, 7], "abab")
    assert one.times_ns == [S, S]
    assert one.waits_ms == {"queue_ms": 2.5}


@pytest.mark.parametrize(
    ("told", "problem"),
    [
        (end_of(tokens_predicted=4), "4 tokens were counted and 3 were delivered"),
        (end_of(tokens_evaluated=99), "a prompt of 100 tokens was counted as 99"),
        (event({"error": {"message": "engine lost"}}), "engine lost"),
        (Event(0, b"[DONE]"), "not llama-server's"),
    ],
)
def test_a_native_stream_that_does_not_add_up(told, problem):
    with pytest.raises(ClientError, match=problem):
        take_native(native_read(), told, S)


def test_an_openai_stream_is_judged_by_its_usage():
    one = Read(ask())
    for text in ("a", "bc"):
        assert not take_openai(one, event({"choices": [{"text": text}]}), S)
    usage = {"prompt_tokens": 100, "completion_tokens": 3}
    assert not take_openai(one, event({"choices": [], "usage": usage}), S)
    assert take_openai(one, Event(0, b"[DONE]"), S)
    assert (one.tokens, one.text) == (3, "abc")
    with pytest.raises(ClientError, match="counted as 7"):
        take_openai(one, event({"choices": [], "usage": usage | {"prompt_tokens": 7}}), S)
    with pytest.raises(ClientError, match="not OpenAI's"):
        take_openai(one, event({"text": "?"}), S)


def test_runs_with_a_hole_are_rejected():
    whole = read(1, 2, 3)
    check_reads([whole], is_cut=False, limit_s=9)
    short = msgspec.structs.replace(whole, ask=ask(tokens=4))
    with pytest.raises(Rejected, match="3 of 4 tokens came"):
        check_reads([short], is_cut=False, limit_s=9)
    with pytest.raises(Rejected, match="not answered within 9 s"):
        check_reads([read(1, end="cut")], is_cut=False, limit_s=9)
    check_reads([read(1, end="cut")], is_cut=True, limit_s=9)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("llamacpp:tokens_predicted_total", "4 tokens, the clients 3"),
        ("llamacpp:prompt_tokens_cached_total", "101 prompt tokens, the clients 100"),
        ("phaseloop:exclusion_violations_total", "1 rounds were not of their phase"),
    ],
)
def test_counters_that_do_not_add_up_are_rejected(name, problem):
    counted = {"llamacpp:tokens_predicted_total": 3.0, "llamacpp:prompt_tokens_total": 100.0}
    check_counters(FAIR, [read(1, 2, 3)], counted)
    with pytest.raises(Rejected, match=problem):
        check_counters(FAIR, [read(1, 2, 3)], counted | {name: counted.get(name, 0) + 1})


def test_rejected_runs_are_counted_and_no_part_of_a_figure():
    good = sample_of(Run((read(1, 2),), S, 0, {}))
    taken = (Taken(1, "quantum", good), Taken(2, "quantum", rejected="<b>it broke</b>"))
    report = Report("x", "w.toml", 1, 0, ("quantum",), ("quantum",), taken, 0.0)
    assert rate_cells(report)[1][1] == "1 of 2"
    assert median_of(report.samples("quantum"), lambda one: one.makespan_s) == 2
    page = as_html(report, [])
    assert b"&lt;b&gt;it broke" in page
    assert b"<b>" not in page


# --- the workload ---------------------------------------------------------------------------------


def test_a_request_knows_its_stream_and_its_length(tmp_path):
    asks = asks_of(read_workload(workload_of(tmp_path, SMALL)), 3)
    assert [one.stream for one in asks].count("chat") == 6
    (long,) = (one for one in asks if one.stream == "long")
    assert (long.prompt_length, long.tokens) == (300, 4)
    assert len(words_for(long, 3).split()) > 300
    assert words_for(long, 3) == words_for(long, 3) != words_for(long, 4)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("output = 5\nchoices = 2", "choices is for phaseloop simulate"),
        ("output = 5\nprefix = { length = 4 }", "prefix is for phaseloop simulate"),
        ("priority = 0", "its answer never ends"),
    ],
)
def test_what_no_client_can_ask_for_is_named(tmp_path, line, problem):
    text = f"[[request]]\nprompt = 8\n{line}\n"
    with pytest.raises(UserError, match=problem):
        asks_of(read_workload(workload_of(tmp_path, text)), 0)


# --- the command ----------------------------------------------------------------------------------


def test_policies_and_another_server_are_measured_in_one_run(tmp_path, capsys):
    """Both engines draw the same sentences for a seed, so all answers must be equal."""
    path, out = workload_of(tmp_path, SMALL), tmp_path / "out.json"
    with ServeProcess(*SIM, "--sim-speed", "0", "--metrics") as other:
        code = main(
            [
                "bench", "policies", str(path), "--sim", "cpu-smollm2",
                "--serve=--sim-speed 0 -np 2", "--policies", "quantum:pp_quantum_ms=5,mixed",
                "--against", f"other={other.ready()}", "--repeats", "2", "--json", str(out),
                "--html", str(tmp_path / "out.html"), "--png", str(tmp_path),
                "--markdown", str(tmp_path / "out.md"),
            ]
        )  # fmt: skip
    assert code == 0, capsys.readouterr()
    found = json.loads(out.read_bytes())
    names = ["quantum:pp_quantum_ms=5", "mixed", "other"]
    table = found["tables"]["Throughput"]
    assert [line[0] for line in table[1:]] == names
    assert [line[1] for line in table[1:]] == ["2 of 2"] * 3
    assert [line[-1] for line in table[1:]] == ["14/14"] * 3
    runs = found["measured"]["taken"]
    assert len({tuple(run["sample"]["outputs"]) for run in runs}) == 1
    assert all(len(read["ids"]) == read["ask"]["tokens"] for read in runs[0]["sample"]["reads"])
    for name in ("work-runs.png", "work-waits.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "out.html").read_text().count("data:image/png;base64,") == 2
    assert "| quantum:pp_quantum_ms=5 | 2 of 2 |" in (tmp_path / "out.md").read_text()


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--policies", "quantom"), "no policy 'quantom'"),
        (
            ("--policies", "mixed:linger_ms=5"),
            "phaseloop: --policies mixed:linger_ms=5: the server: PUT /phase: 400: ",
        ),
        (("--policies", "mixed,quantum,mixed"), "mixed is named twice"),
        (("--policies", "quantum:a=1:b=2,quantum:b=2:a=1"), "quantum:b=2:a=1 is named twice"),
        (("--policies", "quantum:pp_quantum_ms=5:pp_quantum_ms=6"), "pp_quantum_ms is named twice"),
        (("--serve=--port",), "phaseloop: --port wants N after it"),
        (("--policies", "mixed", "--against", "mixed=http://127.0.0.1:1"), "have one name"),
        (("--against", "other"), "NAME=URL is expected"),
        (("--against", "other=http://127.0.0.1:1"), "127.0.0.1:1 cannot be reached"),
        (("--against", "other=ftp://x"), "an address like http"),
    ],
)
def test_what_cannot_be_compared_is_said_before_anything_is_measured(
    tmp_path, capsys, arguments, problem
):
    path = workload_of(tmp_path, SMALL)
    assert main(["bench", "policies", str(path), "--sim", "cpu-smollm2", *arguments]) == 2
    assert problem in capsys.readouterr().err


@pytest.mark.parametrize(
    ("status", "body", "came"),
    [
        ("404 Not Found", b"nope", "404: nope"),
        ("200 OK", b"<html>\n<p>", "200 with what is no list of models: '<html> <p>'"),
        ("200 OK", b'"\xff"', "200 with what is no list of models: '\"\ufffd\"'"),
        ("200 OK", b'{"data": []}', "200 with what is no list of models: '{\"data\": []}'"),
        ("200 OK", b"", "200 with what is no list of models: nothing"),
    ],
)
def test_a_web_server_of_another_kind_is_no_server_to_compare(status, body, came):
    async def answer(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        head = f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        writer.close()

    async def ask_it():
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            await bench_policies.find_server("web", url, None, given="--against web=URL")

    with pytest.raises(UserError) as caught:
        asyncio.run(ask_it())
    assert str(caught.value) == (
        "--against web=URL: the URL of a phaseloop, a llama-server or an OpenAI compatible server "
        f"is expected; GET /v1/models answered {came}"
    )


def test_an_interruption_keeps_what_was_measured(tmp_path, monkeypatch, capsys):
    runs = 0
    whole = bench_policies.run_once

    async def interrupted(*arguments):
        nonlocal runs
        runs += 1
        if runs > 3:  # the warm-up of both, and one run
            raise KeyboardInterrupt
        return await whole(*arguments)

    monkeypatch.setattr(bench_policies, "run_once", interrupted)
    out = tmp_path / "out.json"
    code = main(
        ["bench", "policies", str(workload_of(tmp_path, SMALL)), "--sim", "cpu-smollm2",
         "--serve=--sim-speed 0", "--policies", "mixed,quantum", "--json", str(out)]
    )  # fmt: skip
    assert code == 130
    measured = json.loads(out.read_bytes())["measured"]
    assert len(measured["taken"]) == 1
    assert measured["is_interrupted"]
    assert "interrupted: what was measured until then is shown" in capsys.readouterr().out


def test_totals_of_the_server_are_read_without_labels():
    async def main():
        async def answer(reader, writer):
            await reader.readuntil(b"\r\n\r\n")
            body = b'# HELP a b\na 3\nb{kind="x"} 4\nc 0.5\n'
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
            writer.close()

        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            address = Address("127.0.0.1", port, "", False)
            return await counters(msgspec.structs.replace(HERE, address=address))

    assert asyncio.run(main()) == {"a": 3, "c": 0.5}


def test_tables_without_figures_are_left_out():
    good = sample_of(Run((read(1, 2),), S, 0, {}))
    report = Report("x", "w.toml", 1, 0, ("other",), (), (Taken(1, "other", good),), 0.0)
    assert [title for title, _ in sections(report)] == [
        "Throughput", "First token, ms", "Gaps between tokens, ms"
    ]  # fmt: skip


# --- pictures -------------------------------------------------------------------------------------


def test_lines_are_named_by_their_stream_and_columns_can_be_compared():
    """First tokens after 1 s of one stream and 100 s of the other: both pictures reach to both."""
    plots = pytest.importorskip("phaseloop.cli.bench_policies_plots", reason="no matplotlib")
    reads = (read(1, 2), read(1, 3), read(100, 104, stream="long"))
    taken = (Taken(1, "quantum", sample_of(Run(reads, 200 * S, 0, {}))),)
    report = Report("x", "w.toml", 3, 0, ("quantum",), ("quantum",), taken, 0.0)
    (lines,) = plots.runs(report).axes
    named = zip(lines.get_yticks(), lines.get_yticklabels(), strict=True)
    assert [(place, label.get_text()) for place, label in named] == [(0.5, "chat"), (2, "long")]
    of_chat, _, of_long, _ = plots.waits(report).axes
    low, high = of_chat.get_xlim()
    assert low < 1 < 100 < high
    assert of_long.get_xlim() == (low, high)
