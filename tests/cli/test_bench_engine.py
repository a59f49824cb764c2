"""Goal: `phaseloop bench engine` measures what it says, against programs that may answer anything.

Method: a tiny model of random weights; in llama.cpp's place scripts that answer as its programs do,
with speeds that are known, or that fail in the ways that programs fail; arithmetic by hand.  How
fast this machine is, is nowhere asserted.
"""

import json
import sys

import pytest

pytest.importorskip("gguf")
pytest.importorskip("ggml")

from synthetic import decoder_file

from phaseloop.cli import bench_engine
from phaseloop.cli.bench_engine_limits import Limits, largest_of_kinds, measure_limits, needed
from phaseloop.cli.bench_engine_llama import Timings, decoded_by, ending
from phaseloop.cli.bench_engine_report import Report, Taken, with_spread
from phaseloop.cli.bench_engine_rows import Row
from phaseloop.cli.errors import UserError
from phaseloop.cli.main import main
from phaseloop.model.load import load_model
from phaseloop.model.weights import open_weights

BENCH = """\
import json, sys
at = lambda flag: int(sys.argv[sys.argv.index(flag) + 1])
prompt, generated = at("-p"), at("-n")
{before}
print(json.dumps([{{"n_prompt": prompt, "n_gen": generated, "avg_ts": 250.0,
                   "build_commit": "abc", "build_number": 7, "model_type": "x"}}]))
"""
SERVER = """\
import json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_): pass
    def do_GET(self): self.answer({{"status": "ok"}})
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompts = asked["prompt"]
        streams = prompts if isinstance(prompts[0], list) else [prompts]
        wanted = asked["n_predict"]
        done = [{{"timings": {{"prompt_n": len(p), "prompt_ms": 10.0 * len(p),
                  "predicted_n": wanted {less}, "predicted_ms": 4.0 * (wanted - 1) + 1e-9}}}}
                for p in streams]
        self.answer(done if len(done) > 1 else done[0])
    def answer(self, content):
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
port = int(sys.argv[sys.argv.index("--port") + 1])
HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""
LIMITS = Limits(100, 10, 12, 1000.0, {"F32": 600.0}, 10 / 600, 12 / 600)
NONE_PREFILL, NONE_DECODE = ("--prefill", ""), ("--decode", "")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return decoder_file("llama", "Q4_1").write(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.fixture
def script(tmp_path):
    """Puts a program into a file, and gives its command line."""

    def write(text):
        path = tmp_path / "program.py"
        path.write_text(text)
        return f"{sys.executable} {path}"

    return write


@pytest.fixture
def bench(model, tmp_path):
    """Runs the command on one thread, once, and gives its exit code and its JSON."""

    def run(*arguments):
        out = tmp_path / "out.json"
        fixed = ["-m", str(model), "--threads", "1", "--repeats", "1", "--json", str(out)]
        code = main(["bench", "engine", *fixed, *arguments])
        return code, json.loads(out.read_bytes()) if out.exists() else None

    return run


def taken_by(found, runner):
    return [one for one in found["measured"]["taken"] if one["runner"] == runner]


# --- runs -----------------------------------------------------------------------------------------


def test_every_row_is_measured_on_both_paths(bench, capsys):
    code, found = bench("--prefill", "96", "--decode", "1,3")
    assert code == 0
    for runner in ("engine", "engine fast", "pass", "pass fast"):
        samples = taken_by(found, runner)
        tokens = {(one["row"]["kind"], one["row"]["size"]): one["tokens"] for one in samples}
        assert tokens == {("prefill", 96): 96, ("decode", 1): 64, ("decode", 3): 192}
        assert all(one["seconds"] > 0 and one["rejected"] is None for one in samples)
    out = capsys.readouterr().out
    assert "decode 3 streams" in out and "GB/s" in out


def test_a_prompt_longer_than_a_round_is_measured_whole(bench):
    code, found = bench("--prefill", "2100", *NONE_DECODE)
    assert code == 0
    assert [one["tokens"] for one in taken_by(found, "engine")] == [2100]


def test_llama_bench_is_read_and_set_beside_the_engine(bench, script, capsys):
    program = script(BENCH.format(before=""))
    code, found = bench("--prefill", "96", "--decode", "1,2", "--against", f"llama-bench={program}")
    assert code == 0
    samples = taken_by(found, "llama-bench")
    assert {(one["tokens"], one["seconds"]) for one in samples} == {(96, 0.384), (64, 0.256)}
    engine = next(r for r in found["results"] if r["row"]["kind"] == "prefill")
    assert engine["ratios"]["engine / llama-bench"] == engine["rates"]["engine"] / 250.0
    assert "build 7 (abc)" in capsys.readouterr().out


def test_llama_server_is_started_asked_and_ended(bench, script):
    program = script(SERVER.format(less=""))
    code, found = bench(
        "--prefill", "96", "--decode", "1,2", "--against", f"llama-server={program}"
    )
    assert code == 0
    rates = [one["tokens"] / one["seconds"] for one in taken_by(found, "llama-server")]
    assert sorted(rates) == pytest.approx([100, 250, 500])


def test_samples_of_other_counts_are_rejected_and_counted(bench, script, capsys):
    program = script(SERVER.format(less="- 1"))
    code, found = bench(*NONE_PREFILL, "--decode", "2", "--against", f"llama-server={program}")
    assert code == 0
    (sample,) = taken_by(found, "llama-server")
    assert sample["rejected"] == "1 + 64 tokens, not 1 + 65"
    assert "1 samples rejected: llama-server, decode 2 streams" in capsys.readouterr().out
    assert found["results"][0]["ratios"]["engine / llama-server"] is None


def test_cpu_time_is_counted_where_that_is_asked_for(bench, script):
    program = script(SERVER.format(less=""))
    against = ("--against", f"llama-server={program}")
    code, found = bench("--prefill", "96", *NONE_DECODE, "--clock", "cpu", *against)
    assert code == 0
    (sample,) = taken_by(found, "llama-server")
    assert sample["tokens"] == 96
    assert 0 < sample["seconds"] < 0.96  # what the script claims to have taken


def test_every_sample_is_a_line_of_csv(bench, tmp_path):
    path = tmp_path / "samples.csv"
    assert bench("--prefill", "64", *NONE_DECODE, "--csv", str(path))[0] == 0
    first, *lines = path.read_text().splitlines()
    assert first == "repeat,kind,size,runner,tokens,seconds,rejected"
    assert {line.rsplit(",", 2)[0] for line in lines} == {
        f"1,prefill,64,{runner},64" for runner in ("engine", "engine fast", "pass", "pass fast")
    }


def test_the_page_keeps_what_is_not_measured(bench, tmp_path, model):
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- engine: begin -->\nold\n<!-- engine: end -->\nafter\n")
    assert bench("--prefill", "64", *NONE_DECODE, "--markdown", str(page))[0] == 0
    text = page.read_text()
    assert text.startswith("before\n<!-- engine: begin -->\n\nMeasured on ")
    assert text.endswith("\n\n<!-- engine: end -->\nafter\n")
    assert "| prefill 64 tokens | " in text and "old" not in text
    assert "-m tiny.gguf --threads 1" in text and str(model.parent) not in text


# --- what cannot be measured ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--against", "llama-bench=/nowhere/llama-bench"), "no program is there"),
        (("--against", "llama-bench="), "no program is there"),
        (("--against", "vllm=vllm"), "known are llama-bench and llama-server"),
        (("--against", "llama-bench='"), "No closing quotation"),
        (("--prefill", "", "--decode", ""), "nothing to measure"),
        (("--clock", "cpu", "--threads", "2"), "wants --threads 1"),
        (("--clock", "cpu", "--against", "llama-bench=true"), "leaves llama-bench out"),
        (("--markdown", "nowhere/page.md"), "--markdown nowhere/page.md: No such file"),
    ],
)
def test_options_that_cannot_be_met_are_refused_at_once(bench, capsys, arguments, says):
    assert bench(*arguments)[0] == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("phaseloop: ") and says in err


@pytest.mark.parametrize(
    ("before", "says"),
    [
        ("sys.exit('the model is broken')", "ended with exit code 1\n  the model is broken"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGILL)", "SIGILL: it has instructions"),
        ("print('no JSON'); sys.exit()", "no results that can be read"),
    ],
)
def test_a_program_that_fails_is_quoted(bench, script, capsys, before, says):
    program = script(BENCH.format(before=before))
    code, _ = bench("--prefill", "64", *NONE_DECODE, "--against", f"llama-bench={program}")
    assert code == 2
    assert says in capsys.readouterr().err


def test_a_server_that_does_not_come_up_is_quoted(bench, script, capsys):
    program = script("import sys; sys.exit('port in use')")
    code, _ = bench("--prefill", "64", *NONE_DECODE, "--against", f"llama-server={program}")
    assert code == 2
    assert "llama-server ended with exit code 1\n  port in use" in capsys.readouterr().err


def test_a_page_without_a_section_is_refused(bench, tmp_path, capsys):
    page = tmp_path / "page.md"
    page.write_text("nothing here\n")
    assert bench("--markdown", str(page))[0] == 2
    assert "no section to rewrite" in capsys.readouterr().err
    assert page.read_text() == "nothing here\n"


def test_what_cannot_be_written_is_said(bench, tmp_path, capsys):
    assert bench("--prefill", "64", *NONE_DECODE, "--csv", str(tmp_path))[0] == 2
    assert f"{tmp_path} cannot be written: Is a directory" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["0", "-1", "x", "1,,x", "²"])
def test_sizes_are_positive_integers(capsys, text):
    assert main(["bench", "engine", "-m", "x", "--decode", text]) == 2
    assert "is not an integer from 1 on" in capsys.readouterr().err


# --- arithmetic -----------------------------------------------------------------------------------


def test_a_streams_first_token_is_not_generated_in_its_time():
    """Two streams of 64 tokens after the first, in 1 s and in 2 s: 64/s + 32/s."""
    timings = [Timings(1, 5.0, 65, 1000.0), Timings(1, 5.0, 65, 2000.0)]
    assert decoded_by(timings).rate == pytest.approx(96)


def test_the_limit_is_what_binds_first():
    """60 tokens/s to compute; 100 bytes a round at 1000 bytes/s are 10 rounds/s."""
    assert LIMITS.rate(Row("prefill", 512)) == pytest.approx(60)
    assert LIMITS.rate(Row("decode", 1)) == pytest.approx(10)
    assert LIMITS.rate(Row("decode", 8)) == pytest.approx(50)  # 12 multiply-adds each


def test_ratios_pair_what_was_measured_in_the_same_repeat():
    """Twice as fast in each repeat, while the machine halves its speed from one to the next."""
    row = Row("prefill", 512)
    taken = [
        Taken(repeat, row, runner, 512, seconds * 2**repeat)
        for repeat in (1, 2, 3)
        for runner, seconds in (("engine", 1.0), ("llama-bench", 2.0))
    ]
    taken.append(Taken(4, row, "engine", 512, 100.0))
    taken.append(Taken(4, row, "llama-bench", rejected="nothing came"))
    report = Report(
        "", "", 0, "", 1, "wall", 4, {"llama-bench": ""}, (row,), ("engine", "llama-bench"),
        tuple(taken), LIMITS, 0.0,
    )  # fmt: skip
    assert report.ratio(row, "engine", "llama-bench") == 2.0
    assert report.rate(row, "llama-bench") == 64.0
    assert report.ratio(row, "engine", "llama-server") is None


def test_the_spread_is_half_the_distance_of_the_quartiles():
    """Of 90 95 100 105 110 the quartiles are 95 and 105: ±5 of 100."""
    assert with_spread([100, 90, 110, 95, 105]) == "100 ±5.0%"
    assert with_spread([12.34]) == "12.3"
    assert with_spread([]) == ""


def test_limits_count_each_weight_that_a_token_needs(model):
    """Per layer: q and output 256x256, k and v 128x256, three of 256x256; a head of 160x256."""
    weights = open_weights(model)
    limits = measure_limits(weights, load_model(weights), 1, "cpu")
    layer = (2 * 256 + 2 * 128 + 3 * 256) * 256
    assert limits.prefill_multiply_adds == 2 * layer
    assert limits.decode_multiply_adds == 2 * layer + 160 * 256
    vectors = 4 * 256 * (2 * 2 + 1)  # F32 norms: two per layer, and the last
    assert limits.decode_bytes == (2 * layer + 160 * 256) * 20 // 32 + vectors
    assert set(limits.multiply_adds_per_second) == {"Q4_1"}


def test_of_experts_only_those_used_count(tmp_path):
    file = decoder_file("qwen3moe", "Q4_0", experts=True, head_norms=True)
    weights = open_weights(file.write(tmp_path / "mixture.gguf"))
    count = weights.metadata["qwen3moe.expert_count"]
    used = weights.metadata["qwen3moe.expert_used_count"]
    limits = measure_limits(weights, load_model(weights), 1, "cpu")
    body, _ = needed(weights.tensors)
    sizes = {len(w.shape): 0 for w in body.values()}
    for w in body.values():
        sizes[len(w.shape)] += w.data.size * 32 // 18 if w.kind == "Q4_0" else w.data.size // 4
    assert limits.prefill_multiply_adds == sizes[2] + sizes[3] * used // count


def test_a_tied_embedding_is_the_head(tmp_path):
    weights = open_weights(decoder_file("llama", "F32", tied=True).write(tmp_path / "tied.gguf"))
    body, head = needed(weights.tensors)
    assert head is not None and head.name == "token_embd.weight"
    assert head.name not in body
    assert largest_of_kinds(body)["F32"].shape == (256, 256)


def test_how_a_program_ended_is_told():
    assert ending(3, b"a\nb\n") == "ended with exit code 3\n  a\n  b"
    assert ending(-9, b"") == "was ended by SIGKILL"


def test_others_are_not_ourselves():
    load = bench_engine.OtherLoad()
    assert 0 <= load.cores() < 1024


def test_a_program_is_shown_without_its_place():
    program = bench_engine.find_program("llama-bench", f"{sys.executable} --repack 0")
    assert program.shown.endswith("--repack 0") and "/" not in program.shown


def test_a_missing_program_names_the_remedy():
    with pytest.raises(UserError, match=r"build llama\.cpp and name its llama-server"):
        bench_engine.find_program("llama-server", "no-such-program-anywhere")
