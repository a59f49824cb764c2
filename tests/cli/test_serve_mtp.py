"""Goal: a file's block for multi-token prediction drafts when asked to, and shows in no answer.

Method: tiny hybrids whose block knows the next token, servers in processes of their own.  Answers
are those of a server without drafts, every draft is accepted.  The block in a file of its own does
the same; what cannot draft is refused by what is missing.
"""

import json

import pytest

pytest.importorskip("gguf")
pytest.importorskip("ggml")

from dflash_files import agreeing, dflash_file, sure_file
from draft_files import knowing_file
from hybrid_files import with_words
from serve_process import ServeProcess, client

PROMPT = [index % 100 for index in range(90)]
REQUESTS = (
    {"prompt": PROMPT, "n_predict": 24, "temperature": 0, "ignore_eos": True},
    {"prompt": PROMPT[:40], "n_predict": 16, "temperature": 1, "seed": 3, "ignore_eos": True},
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("mtp")


@pytest.fixture(scope="module")
def model(folder):
    return with_words(knowing_file("token")).write(folder / "model.gguf")


@pytest.fixture(scope="module")
def parts(folder):
    """The model without its block, and the block by itself."""
    file = with_words(knowing_file("token"))
    block = with_words(knowing_file("token"))
    for name in list(file.tensors):
        if name.startswith("blk.4."):
            del file.tensors[name]
        elif name.startswith("blk."):
            del block.tensors[name]
    del file.metadata["nextn_predict_layers"]
    file.metadata["block_count"] = 4
    return file.write(folder / "trunk.gguf"), block.write(folder / "block.gguf")


def flags(path, *more):
    return ("-m", str(path), "-c", "1024", "-np", "2", "-t", "1", *map(str, more))


def answers(path, *more):
    with ServeProcess(*flags(path, *more)) as server, client(server.ready()) as http:
        found = [http.post("/completion", json=body).raise_for_status() for body in REQUESTS]
    return [one.json() for one in found]


def refusal(path, *more):
    with ServeProcess(*flags(path, *more)) as server:
        assert server.end() == 2
    said = " ".join([*server.other, *(json.dumps(line) for line in server.lines)])
    assert "Traceback" not in said
    return said


def check(found, plain, least=8):
    assert [one["content"] for one in found] == [one["content"] for one in plain]
    for one in found:
        timings = one["timings"]
        assert timings["draft_n_accepted"] == timings["draft_n"] > least


def test_a_block_drafts_for_its_model_from_its_file_and_from_its_own(model, parts):
    trunk, block = parts
    plain = answers(trunk)
    assert "draft_n" not in plain[0]["timings"]
    free = ("--draft-cost", 0)
    check(answers(model, "--spec-type", "draft-mtp", *free), plain)
    check(answers(trunk, "-md", block, *free), plain)


def test_a_dflash_file_drafts_for_its_model(folder):
    target = with_words(sure_file()).write(folder / "sure.gguf")
    draft = with_words(agreeing(dflash_file(), 0.1)).write(folder / "dflash.gguf")
    check(answers(target, "-md", draft, "--draft-cost", 0), answers(target), least=4)
    said = refusal(target, "--spec-type", "draft-dflash")
    assert "--spec-type draft-dflash: name the draft model, with -md" in said


def test_what_cannot_draft_is_refused_by_name(parts, folder):
    trunk, block = parts
    assert "has no block for multi-token prediction" in refusal(trunk, "--spec-type", "draft-mtp")
    assert "only the block that drafts" in refusal(block)
    said = refusal(trunk, "-md", block, "--spec-type", "draft-simple")
    assert "is for draft-mtp" in said
    said = refusal(trunk, "-md", block, "--spec-type", "draft-mtp,draft-simple")
    assert "only one model can draft" in said
