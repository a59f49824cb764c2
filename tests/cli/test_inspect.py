"""Goal: `phaseloop inspect` says what is in a file, what it takes, and why it cannot be served.

Method: tiny files that the tests write, whose sizes are arithmetic; and broken ones.
"""

import json
import re

import pytest
from encoder_files import encoder_file
from real_geometry import write as write_real
from synthetic import HEAD_WIDTH, KV_HEADS, LAYERS, VOCABULARY, WIDTH, decoder_file

from phaseloop.cli.inspect import printable
from phaseloop.cli.main import main

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


def words(file):
    """A tokenizer of single bytes, as byte-level BPE spells them, and two special tokens."""
    printable_bytes = [*range(33, 127), *range(161, 173), *range(174, 256)]
    names, spare = [], 256
    for byte in range(256):
        names.append(chr(byte if byte in printable_bytes else spare))
        spare += byte not in printable_bytes
    tokens = [*names[: VOCABULARY - 2], "<s>", "</s>"]
    file.root |= {
        "general.name": "Tiny \x1b[31mred",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * (len(tokens) - 2) + [3, 3],
        "tokenizer.ggml.merges": [f"{tokens[0]} {tokens[1]}"],
        "tokenizer.ggml.bos_token_id": len(tokens) - 2,
        "tokenizer.ggml.eos_token_id": len(tokens) - 1,
        "tokenizer.chat_template": TEMPLATE,
    }
    return file


def inspected(capsys, path, *more) -> tuple[int, dict]:
    code = main(["inspect", str(path), "--json", *more])
    return code, json.loads(capsys.readouterr().out)


def test_a_model_that_can_be_served(tmp_path, capsys):
    path = words(decoder_file("llama", "Q4_0")).write(tmp_path / "tiny.gguf")
    code, facts = inspected(capsys, path, "-c", "256", "-np", "2", "--cache-type", "q8_0")
    assert (code, facts["obstacles"]) == (0, [])
    assert facts["shape"] | {"layers": LAYERS, "width": WIDTH, "context": 512} == facts["shape"]
    assert sum(share["size_bytes"] for share in facts["mix"]) == facts["size_bytes"]
    assert facts["mix"][0]["kind"] == "Q4_0"
    assert 4.5 <= facts["bits_per_weight"] < 6, "18 bytes for 32 weights, and some in F32"
    assert facts["tokenizer"]["special"] == {"bos": "<s>", "eos": "</s>"}
    assert facts["template"]["system_role"]
    memory = facts["memory"]
    per_token = 2 * LAYERS * KV_HEADS * HEAD_WIDTH * 34 // 32  # a block of 32 takes 34 bytes
    assert (memory["slots"], memory["cache_bytes"]) == (2, 256 * per_token)


@pytest.mark.parametrize(
    ("change", "obstacle"),
    [
        (lambda file: setattr(file, "architecture", "mamba9"), "architecture 'mamba9' is not"),
        (lambda file: file.root.pop("tokenizer.ggml.tokens"), "tokenizer.ggml.tokens"),
        (lambda file: file.tensors.pop("blk.0.attn_q.weight"), "blk.0.attn_q.weight"),
    ],
)
def test_a_model_that_cannot_is_described_nevertheless(tmp_path, capsys, change, obstacle):
    file = words(decoder_file("llama"))
    change(file)
    code, facts = inspected(capsys, file.write(tmp_path / "odd.gguf"))
    assert code == 1
    (said,) = facts["obstacles"]
    assert obstacle in said
    assert facts["parameters"] > VOCABULARY * WIDTH


def test_a_template_that_does_not_work_is_noted(tmp_path, capsys):
    file = words(decoder_file("llama"))
    file.root["tokenizer.chat_template"] = "{% for %}"
    code, facts = inspected(capsys, file.write(tmp_path / "odd.gguf"))
    assert (code, facts["template"]) == (0, None)
    assert any("ChatML is used" in note for note in facts["notes"])


def test_an_encoder_is_told_from_what_generates(tmp_path, capsys):
    path = encoder_file().write(tmp_path / "tiny.gguf")
    code, facts = inspected(capsys, path)
    assert (code, facts["obstacles"], facts["template"]) == (0, [], None)
    assert any("serve --embeddings" in note for note in facts["notes"])
    assert not any("ChatML" in note or "output head" in note for note in facts["notes"])


def test_a_context_that_does_not_fit_comes_with_one_that_does(tmp_path, capsys, monkeypatch):
    path = words(decoder_file("llama")).write(tmp_path / "tiny.gguf")
    monkeypatch.setattr("phaseloop.cli.inspect_facts.available_memory", lambda: 300 << 20)
    assert main(["inspect", str(path), "-c", "10000000"]) == 0
    out = capsys.readouterr().out
    _, facts = inspected(capsys, path, "-c", "10000000")
    fitting = facts["memory"]["context_that_fits"]
    assert 0 < fitting < 10_000_000
    assert f"does not fit here; -c {fitting} would" in out


def test_people_are_shown_the_same_and_their_terminal_is_safe(tmp_path, capsys):
    path = words(decoder_file("llama", "Q4_0", tied=True)).write(tmp_path / "tiny.gguf")
    assert main(["inspect", str(path), "--tensors"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^can be served +yes", out, re.MULTILINE)
    assert "the output head is the embedding" in out
    assert "token_embd.weight" in out
    assert "\x1b" not in out
    assert printable("a\x1b[0m\nb") == "a\\x1b[0m\\nb"


@pytest.mark.parametrize(
    ("content", "problem"),
    [(b"GGUF", "too few"), (b"PK\3\4" + bytes(60), "not a GGUF file"), (None, "missing.gguf")],
)
def test_what_is_no_model_is_an_error(tmp_path, capsys, content, problem):
    path = tmp_path / "missing.gguf"
    if content is not None:
        path.write_bytes(content)
    assert main(["inspect", str(path)]) == 2
    assert problem in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [("-c", "0"), ("-np", "many"), ("--cache-type", "q4_9")])
def test_wrong_options_are_usage_errors(tmp_path, capsys, arguments):
    assert main(["inspect", "x.gguf", *arguments]) == 2
    assert "usage: phaseloop inspect" in capsys.readouterr().err


# --- several GPUs ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    return write_real(tmp_path_factory.mktemp("real") / "qwen3.8-27b.gguf")


BOX = ("-c", "400000", "-np", "4", "--cache-type", "q8_0", "--tensor-split", "31,31,30,8")


def test_a_plan_for_the_gpus_of_a_box(capsys, real):
    """34 KiB a token in the 16 layers that attend, and 2.125 in the one that drafts."""
    code, facts = inspected(capsys, real, *BOX, "--device-memory", "16GiB")
    devices = facts["devices"]
    assert code == 0 and all(device["fits"] for device in devices)
    assert [device["layers"] for device in devices] == [21, 20, 20, 4]
    assert sum(device["cache_bytes"] for device in devices) == 400_000 * (34 + 2.125) * 1024
    assert {device["available_bytes"] for device in devices} == {16 << 30}
    assert main(["inspect", str(real), *BOX]) == 0
    assert "GPU 3" in capsys.readouterr().out, "without sizes nothing is refused"


def test_gpus_that_are_too_small_are_refused_with_what_fits(capsys, real):
    code, facts = inspected(capsys, real, *BOX, "--device-memory", "8GiB,16GiB,16GiB,16GiB")
    assert code == 1 and [device["fits"] for device in facts["devices"]] == [False, *[True] * 3]
    advice = facts["obstacles"][-1]
    split, context = (re.search(rf"{flag} ([0-9,.]+)", advice)[1] for flag in ("-split", "-c"))
    memory = ("--device-memory", "8GiB,16GiB,16GiB,16GiB")
    assert inspected(capsys, real, *BOX, *memory, "--tensor-split", split)[0] == 0
    assert inspected(capsys, real, *BOX, *memory, "-c", context)[0] == 0


@pytest.mark.parametrize("flags", [
    ("--tensor-split", "0,0"), ("--tensor-split", "1,-1"), ("--tensor-split", "x"),
    ("--tensor-split", "nan"), ("--device-memory", "16"), ("--device-memory", "1GiB,"),
    ("--tensor-split", "1,1", "--device-memory", "1GiB,1GiB,1GiB"),
])  # fmt: skip
def test_odd_gpus_are_refused(capsys, real, flags):
    with pytest.raises(SystemExit) as ended:
        raise SystemExit(main(["inspect", str(real), *flags]))
    assert ended.value.code == 2
    assert flags[0] in capsys.readouterr().err
