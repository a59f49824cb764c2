"""Goal: start scripts written for llama-server run, or fail with a sentence that says why.

Method: the rows of the interface's list of flags and of llama-server's own help, as facts; the
reader on made-up lines; the page of flags compared with the table.
"""

import math
import re
from pathlib import Path

import pytest

from phaseloop.cli import flags_help
from phaseloop.cli.errors import UserError
from phaseloop.cli.flags_foreign import FOREIGN
from phaseloop.cli.flags_serve import USED
from phaseloop.cli.serve_settings import (
    Settings,
    policy_of,
    read_settings,
    sampling_of,
    template_variables,
)
from phaseloop.engine.settings import Sampling

ROOT = Path(__file__).parents[2]
FLAGS = [*(flag for group in USED for flag in group.flags), *FOREIGN]
BY_NAME = {name: flag for flag in FLAGS for name in (*flag.names, *flag.off)}


def settings(line: str, **environment: str) -> Settings:
    return read_settings(["-m", "x", *line.split()], environment)[0]


def warnings(line: str, **environment: str) -> tuple[str, ...]:
    return read_settings(["-m", "x", *line.split()], environment)[1]


def refusal(line: str, **environment: str) -> str:
    with pytest.raises(UserError) as error:
        read_settings(line.split(), environment)
    assert error.value.exit_code == 2
    return str(error.value)


# --- what the table knows -------------------------------------------------------------------------

TYPED = {  # flags users type -> what becomes of them
    "used": (
        "-m --model -hf --hf-repo -hff --hf-file -hft --offline -c --ctx-size -np --parallel -t "
        "--threads -b -ub -ctk -ctv -n --predict --temp --top-k --top-p --min-p --repeat-penalty "
        "-s --seed --samplers --slot-save-path --host --port --api-key --api-key-file "
        "--api-prefix -to --cors-origins -a --alias --tags --metrics --slots --no-slots --props "
        "--cache-ram -cram "
        "-sps --no-cache-prompt --context-shift -cb -nocb --chat-template --chat-template-file "
        "--chat-template-kwargs --reasoning --reasoning-format -lv --log-file --log-jsonl -v "
        "--verbose --policy --tg-quantum-ms --pp-quantum-ms --seat-quantum-ms --max-round-ms "
        "--linger-ms --max-queued --max-queue-ms "
        "--output-reserve --client-stall-ms --shutdown-grace-s --phase-control --serial-order "
        "--repack --no-repack --trace --trace-content --fast-attention --reuse-generated "
        "--supervise --sim --sim-speed -md --model-draft -hfd --spec-type --spec-default "
        "--draft-max --draft-min --draft-p-min --spec-draft-n-max --spec-draft-n-min "
        "--spec-draft-p-min --spec-ngram-simple-size-n --spec-ngram-simple-size-m"
    ),
    "ignored": (
        "-tb -ngl --gpu-layers -fa --flash-attn -sm -mg --mlock -lm --no-mmap --numa -ot -cmoe "
        "-fit --threads-http --no-ui --webui --cache-reuse -kvu --no-kv-unified --jinja --no-jinja "
        "--log-timestamps --log-prefix"
    ),
    "refused": (
        "-mu --grammar --grammar-file -j --json-schema --mmproj "
        "-lcs --spec-synth-len --tools --models-dir "
        "--mirostat --rope-scaling --reasoning-budget"
    ),
}


@pytest.mark.parametrize("status", TYPED)
def test_flags_that_users_type_are_known(status):
    for name in TYPED[status].split():
        assert BY_NAME[name].status == status, name


def test_no_spelling_and_no_variable_means_two_flags():
    names = [name for flag in FLAGS for name in (*flag.names, *flag.off)]
    assert len(names) == len(set(names))
    variables = [flag.env for flag in FLAGS if flag.env]
    assert len(variables) == len(set(variables))


def test_every_field_of_the_settings_has_its_flag_and_no_flag_leads_nowhere():
    fields = [flag.field for flag in FLAGS if flag.status == "used"]
    assert sorted({*fields}) == sorted(Settings.__struct_fields__)
    assert {field for field in fields if fields.count(field) > 1} == {"lora"}


def test_what_does_nothing_says_why():
    assert [flag.name for flag in FOREIGN if not flag.about] == []


def test_defaults_are_those_of_llama_server():
    found = settings("")
    assert (found.host, found.port, found.batch, found.ubatch) == ("127.0.0.1", 8080, 2048, 512)
    assert (found.predict, found.seed, found.timeout, found.cors_origins) == (-1, -1, 3600, "*")
    assert sampling_of(found) == Sampling()


# --- reading a line -------------------------------------------------------------------------------


def test_a_line_of_llama_server():
    line = "-c 4096 -np 2 -b 1024 -n 64 --temp 0.5 --top_k 7 -a one,two --port=9000 --metrics"
    found = settings(line)
    assert (found.context, found.slots, found.batch, found.predict) == (4096, 2, 1024, 64)
    assert (found.temperature, found.top_k, found.port) == (0.5, 7, 9000)
    assert found.alias == ("one", "two")
    assert found.metrics is True


@pytest.mark.parametrize(
    "line, field, value",
    [
        ("-n -1", "predict", -1),  # a value may begin with a dash
        ("--port 1 --port 2", "port", 2),  # the last one counts
        ("--api-key a,b --api-key c", "api_key", ("a", "b", "c")),  # unless they are collected
        ("-l 5+1 -l 7-inf", "logit_bias", ((5, 1.0), (7, -math.inf))),
        ("--no-slots", "show_slots", False),
        ("-nr", "repack", False),
        ("-dev cuda -ts 3,1", "tensor_split", (3.0, 1.0)),
        ("--no-slots --slots", "show_slots", True),
        ("--log-colors", "log_colors", "on"),  # stands without a value
        ("--log-colors off", "log_colors", "off"),
        ("--log-colors --metrics", "metrics", True),
        ('--chat-template-kwargs {"a":1}', "template_variables", {"a": 1}),
    ],
)
def test_values(line, field, value):
    assert getattr(settings(line), field) == value


@pytest.mark.parametrize(
    "line, parts",
    [
        ("--portt 3", ("--portt", "did you mean --port?")),
        ("model.gguf", ("'model.gguf'", "-m")),
        ("-m x --port eighty", ("--port 'eighty'", "not an integer")),
        ("-m x --port 70000", ("--port '70000'", "0 to 65535")),
        ("-m x --top-p nan", ("--top-p 'nan'", "possible are")),
        ("-m x --policy fair", ("--policy 'fair'", "barrier-fair")),
        ("-m x --port", ("--port wants N",)),
        ("-m", ("-m wants FILE|NAME",)),
        ("-m x --metrics=1", ("--metrics takes no value",)),
        ("-m x -l five", ("-l 'five'", "15043-1")),
        ("-m x --chat-template-kwargs [1]", ("--chat-template-kwargs", "not a JSON object")),
        ("-m x --sampler-seq kz", ("--sampler-seq 'z'",)),
        ("-m x --samplers top_k;best", ("--samplers 'best'",)),
        ("-m x --lora a --lora-scaled b:1,a:2", ("--lora a", "twice")),
        ("-m x --lora-scaled a:b", ("--lora-scaled 'a:b'", "FNAME:SCALE")),
        ("-m x --lora-scaled a", ("--lora-scaled 'a'", "FNAME:SCALE")),
        ("-m x --lora ,", ("--lora ','", "names no file")),
        ("--sim v100 --lora f", ("--lora", "--sim")),
        ("-m x --lora-init-without-apply", ("--lora-init-without-apply goes with --lora",)),
        ("", ("no model", "-m FILE", "--sim")),
        ("-m x --sim cpu-smollm2", ("--sim goes without",)),
        ("-m x --sim-speed 2", ("--sim-speed goes with --sim",)),
        ("-m x --trace-content ids", ("--trace-content goes with --trace",)),
        ("-m x --linger-ms 5 --policy quantum", ("--linger-ms is for barrier",)),
        ("-m x -nocb --policy quantum", ("-nocb", "quantum")),
        ("-m x -np 0", ("-np 0",)),
        ("-m x --api-key=", ("--api-key ''", "no key", "open to all")),
        ("-m x --api-prefix api", ("--api-prefix 'api'", "/api")),
        ("-m x -l 1+x", ("-l '1+x'", "15043-1")),
        ("-m x -hff f.gguf", ("--hf-file goes with -hf",)),
        ("-m x --spec-type ngram", ("--spec-type 'ngram'", "ngram-simple")),
        ("-m x --spec-type ngram-mod", ("ngram-mod is not built", "nearest is ngram-simple")),
        ("-m x --spec-type draft-simple", ("draft-simple", "-md FILE")),
        ("-m x -md y -hfd a/b", ("-md and -hfd",)),
        ("--sim cpu-smollm2 --spec-type ngram-simple", ("--spec-type", "--sim drafts")),
        ("-m x -md y --draft-min 5", ("--spec-draft-n-min 5", "--spec-draft-n-max 3", "lower")),
        ("-m x --draft-p-min 2", ("--draft-p-min '2'", "0 to 1")),
        ("-m x -ts 1,1", ("--tensor-split goes with --device cuda",)),
        ("-m x -dev none --peer-access all", ("--peer-access goes with --device cuda",)),
        ("-m x -dev cuda -ts 0,0", ("-ts '0,0'", "proportions")),
        ("-m x -dev CUDA0", ("-dev 'CUDA0'", "cuda-host")),
        ("-m x --device cuda --lora f", ("--lora", "use --device cpu")),
        ("-m x --device cuda --embeddings", ("--embeddings", "use --device cpu")),
        ("-m x --device cuda -md y", ("no model drafts", "ngram-simple")),
        ("-m x --device cuda -t 3", ("--threads is about the CPU", "--device cuda")),
        ("--sim cpu-smollm2 --device cuda", ("--device cuda goes with a model",)),
    ],
)
def test_what_is_wrong_is_named_with_what_would_be_right(line, parts):
    message = refusal(line)
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    "line, kinds",
    [
        ("", ()),
        ("--spec-type none", ()),
        ("--spec-type ngram-simple", ("ngram-simple",)),
        ("--spec-default", ("ngram-simple",)),
        ("-md y", ("draft-simple",)),
        ("-md y --spec-default", ("ngram-simple", "draft-simple")),
        ("-md y --spec-type ngram-simple,draft-simple", ("ngram-simple", "draft-simple")),
        ("-md y --spec-type draft-simple,ngram-simple", ("draft-simple", "ngram-simple")),
        ("--spec-type draft-mtp,none,ngram-simple,draft-mtp", ("draft-mtp", "ngram-simple")),
        ("--spec-type draft-mtp --spec-default", ("ngram-simple", "draft-mtp")),
        ("--spec-type draft-mtp,ngram-simple --spec-default", ("draft-mtp", "ngram-simple")),
    ],
)
def test_who_drafts(line, kinds):
    """As in llama-server a draft model says by itself what it is.  The order given counts."""
    assert settings(line).drafters == kinds


def test_what_means_nothing_here_costs_one_warning():
    assert warnings("-ngl 99 -ngl 99 --mlock") == (
        "-ngl has no effect: GPUs compute all layers or none, see --device",
        "--mlock has no effect: weights are always mapped from their file as they are",
    )


def test_a_variable_may_say_one_for_on():
    assert warnings("", LLAMA_ARG_FLASH_ATTN="1", LLAMA_ARG_FIT="on") == ()
    (told,) = warnings("", LLAMA_ARG_FLASH_ATTN="0")
    assert told.startswith("LLAMA_ARG_FLASH_ATTN has no effect")


@pytest.mark.parametrize(
    "line", ["-ngl 0", "-ngl auto", "-fa", "-fa on", "--jinja", "-fit on", "--mirostat 0", "-kvu"]
)
def test_what_asks_for_nothing_out_of_the_way_costs_none(line):
    assert warnings(line) == ()


def test_a_flag_of_two_words_takes_both():
    assert "is not supported" in refusal("-m x --control-vector-layer-range 1 2 --metrics")


# --- the environment ------------------------------------------------------------------------------


def test_variables_count_where_the_line_says_nothing():
    environment = {"LLAMA_ARG_CTX_SIZE": "512", "LLAMA_ARG_PORT": "1", "PHASELOOP_POLICY": "mixed"}
    found = settings("--port 2", **environment)
    assert (found.context, found.port, found.policy) == (512, 2, "mixed")


def test_what_is_collected_on_the_line_replaces_the_variable():
    assert settings("--api-key b", LLAMA_API_KEY="a").api_key == ("b",)
    assert settings("", LLAMA_API_KEY="a,c").api_key == ("a", "c")


@pytest.mark.parametrize(
    "value, is_on", [("1", True), ("on", True), ("true", True), ("0", False), ("off", False)]
)
def test_switches_by_variable(value, is_on):
    assert settings("", LLAMA_ARG_ENDPOINT_METRICS=value).metrics is is_on


def test_switches_are_unset_by_the_negated_variable():
    assert settings("", LLAMA_ARG_NO_CACHE_PROMPT="1").cache_prompt is False


def test_a_bad_variable_is_named():
    assert "LLAMA_ARG_PORT 'x': not an integer" in refusal("-m x", LLAMA_ARG_PORT="x")
    assert "LLAMA_ARG_MMPROJ is not supported" in refusal("-m x", LLAMA_ARG_MMPROJ="f")


def test_an_empty_variable_is_as_good_as_none():
    """As compose files and units have them."""
    found = settings("", LLAMA_ARG_HF_REPO="", LLAMA_ARG_PORT="", LLAMA_API_KEY="")
    assert (found.hf_repo, found.port, found.api_key) == (None, 8080, ())


def test_a_variable_that_nobody_reads_is_told():
    assert warnings("", LLAMA_ARG_CTX_SIZ="1") == (
        "LLAMA_ARG_CTX_SIZ is set, and no flag reads it; did you mean LLAMA_ARG_CTX_SIZE?",
    )
    assert warnings("", LLAMA_ARG_BOGUS="1") == (
        "LLAMA_ARG_BOGUS is set, and no flag reads it",
    )  # what all variables begin with makes none alike
    assert warnings("", LLAMA_ARG_NO_MMAP="1") == (
        "LLAMA_ARG_NO_MMAP has no effect: weights are always mapped from their file as they are",
    )


def test_flags_of_phaseloop_have_variables_of_their_own():
    assert BY_NAME["--tg-quantum-ms"].env == "PHASELOOP_TG_QUANTUM_MS"


# --- what the settings make -----------------------------------------------------------------------


def test_policies():
    assert policy_of(settings("")).name == "barrier-fair"
    assert policy_of(settings("-nocb")).name == "no-cont-batching"
    quantum = policy_of(settings("--policy quantum --tg-quantum-ms 7"))
    assert (quantum.decode_quantum_ns, quantum.prefill_quantum_ns) == (7_000_000, 1_000_000_000)


@pytest.mark.parametrize(
    ("line", "variables"),
    (
        ("", {}),
        ("--reasoning auto", {}),
        ("--reasoning off", {"enable_thinking": False}),
        ("-rea on", {"enable_thinking": True}),
        ('-rea on --chat-template-kwargs {"enable_thinking":false}', {"enable_thinking": False}),
    ),
)
def test_whether_a_model_thinks_is_a_variable_of_its_template(line, variables):
    assert template_variables(settings(line)) == variables


def test_samplers_by_letters_and_by_names():
    by_letters = sampling_of(settings("--sampler-seq kpt")).samplers
    by_names = sampling_of(settings("--samplers top_k;top-p;temperature")).samplers
    assert by_letters == by_names == ("top_k", "top_p", "temperature")


# --- for people -----------------------------------------------------------------------------------


def test_the_help_names_every_flag_that_does_something_and_fits_a_terminal():
    text = flags_help.help_text()
    for group in USED:
        assert f"\n{group.title}:\n" in text
        for flag in group.flags:
            assert f"  {flags_help.spelled(flag)}" in text
    assert max(map(len, text.splitlines())) <= 100


def test_the_page_is_that_of_the_table():
    """`python -m phaseloop.cli.flags_help > docs/serve-flags.md` writes it anew."""
    assert (ROOT / "docs" / "serve-flags.md").read_text() == flags_help.page()


ENCODING = {
    "pooling alone": ("--pooling mean", "--pooling goes with --embeddings"),
    "norm alone": ("--embd-normalize 1", "--embd-normalize goes with --embeddings"),
    "both": ("--reranking --pooling cls", "--reranking is --pooling rank"),
    "another pooling": ("--embeddings --pooling max", "possible are none, mean, cls, last, rank"),
    "a norm": ("--embeddings --embd-normalize -2", "possible are -1 to 1024"),
    "a shift": ("--embeddings --context-shift", "has no answers that could go on"),
}


@pytest.mark.parametrize("name", ENCODING)
def test_what_does_not_go_with_embeddings_is_refused(name):
    line, problem = ENCODING[name]
    with pytest.raises(UserError, match=re.escape(problem)):
        read_settings(["--sim", "v100-qwen27b", *line.split()], {})


def test_what_an_encoding_server_makes_of_texts():
    def wanted(line):
        settings, _ = read_settings(["-m", "x.gguf", *line.split()], {})
        return settings.encodes, settings.wanted_pooling, settings.embd_normalize

    assert wanted("") == (False, None, 2)
    assert wanted("--embedding") == wanted("--embeddings") == (True, None, 2)
    assert wanted("--embeddings --pooling last --embd-normalize -1") == (True, "last", -1)
    assert wanted("--rerank") == wanted("--reranking --pooling rank") == (True, "rank", 2)
