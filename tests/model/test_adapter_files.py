"""Goal: an adapter's file is applied as whoever wrote it meant, or refused by name.

Method: PEFT adapters against GGUF ones of the same factors, converted here as converters do; and
every way in which a file can be wrong, with what its error must name.
"""

import json

import numpy as np
import pytest

pytest.importorskip("gguf")
pytest.importorskip("ggml")

from adapter_files import EMBEDDING, AdapterFile, write_peft
from hybrid_files import KEY_HEADS, STATE, VALUE_HEADS, hybrid_file
from safetensors.numpy import save_file
from synthetic import EXPERTS, HIDDEN, VOCABULARY, WIDTH, decoder_file

from phaseloop.model.adapter import open_adapter
from phaseloop.model.gguf_file import ModelError
from phaseloop.model.load import load_model
from phaseloop.model.weights import open_weights
from phaseloop.ops.reference import unpack

RANDOM = np.random.default_rng(2)
QUERY = "blk.0.attn_q.weight"
Q_PROJ = "model.layers.0.self_attn.q_proj"


def opened(file, folder):
    weights = open_weights(file.write(folder / "model.gguf"))
    return weights, load_model(weights)


def factors(outputs, width, rank=4):
    return RANDOM.standard_normal((rank, width)), RANDOM.standard_normal((outputs, rank))


def of_module(module, a, b):
    return {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}


def changes(found):
    """What an adapter adds to each matrix."""
    return {
        name: part.factor * (unpack(part.b) @ unpack(part.a))
        for name, part in found.adapter.matrices.items()
    }


def close(found, wanted):
    return np.allclose(found, wanted, rtol=1e-5, atol=1e-5)


# --- PEFT -----------------------------------------------------------------------------------------


def test_rows_of_queries_and_keys_are_those_of_the_file(tmp_path):
    """Llama: of a head of 64, output 2 i of the file is i of the checkpoint, 2 i + 1 is 32 + i."""
    a, b = factors(256, WIDTH)
    keys = factors(128, WIDTH)
    values = factors(128, WIDTH)
    tensors = (
        of_module(Q_PROJ, a, b)
        | of_module("model.layers.1.self_attn.k_proj", *keys)
        | of_module("model.layers.1.self_attn.v_proj", *values)
    )
    folder = write_peft(tmp_path / "peft", tensors, alpha=2.0)
    found = changes(open_adapter(folder, *opened(decoder_file("llama"), tmp_path)))
    order = [64 * head + 32 * half + i for head in range(4) for i in range(32) for half in (0, 1)]
    assert close(found[QUERY], 0.5 * (b @ a)[order])
    assert close(found["blk.1.attn_k.weight"], 0.5 * (keys[1] @ keys[0])[order[:128]])
    assert close(found["blk.1.attn_v.weight"], 0.5 * (values[1] @ values[0]))
    assert len(found) == 3


def test_other_families_keep_the_order(tmp_path):
    a, b = factors(256, WIDTH)
    folder = write_peft(tmp_path / "peft", of_module(Q_PROJ, a, b))
    found = changes(open_adapter(folder, *opened(decoder_file("qwen3", head_norms=True), tmp_path)))
    assert close(found[QUERY], 2 * b @ a)


def test_value_heads_of_hybrids_are_tiled(tmp_path):
    """Of 6 heads over 2 key heads, the file has 0 3 1 4 2 5 of the checkpoint."""
    heads = [0, 3, 1, 4, 2, 5]
    rows = [STATE * head + i for head in heads for i in range(STATE)]
    inner, keys = VALUE_HEADS * STATE, 2 * KEY_HEADS * STATE
    base = "model.layers.0.linear_attn."
    sizes = {
        "in_proj_qkv": (keys + inner, WIDTH),
        "in_proj_z": (inner, WIDTH),
        "in_proj_a": (VALUE_HEADS, WIDTH),
        "in_proj_b": (VALUE_HEADS, WIDTH),
        "out_proj": (WIDTH, inner),
    }
    pairs = {name: factors(*size) for name, size in sizes.items()}
    tensors = {}
    for name, pair in pairs.items():
        tensors |= of_module(base + name, *pair)
    folder = write_peft(tmp_path / "peft", tensors, alpha=4.0)
    found = changes(open_adapter(folder, *opened(hybrid_file(), tmp_path)))
    product = {name: b @ a for name, (a, b) in pairs.items()}
    qkv = [*range(keys), *(keys + row for row in rows)]
    assert close(found["blk.0.attn_qkv.weight"], product["in_proj_qkv"][qkv])
    assert close(found["blk.0.attn_gate.weight"], product["in_proj_z"][rows])
    assert close(found["blk.0.ssm_alpha.weight"], product["in_proj_a"][heads])
    assert close(found["blk.0.ssm_beta.weight"], product["in_proj_b"][heads])
    assert close(found["blk.0.ssm_out.weight"], product["out_proj"][:, rows])


def test_experts_are_stacked(tmp_path):
    """Those that the adapter leaves alone get nothing; ranks may differ."""
    first, last = factors(HIDDEN, WIDTH, 2), factors(HIDDEN, WIDTH, 3)
    tensors = of_module("model.layers.1.mlp.experts.0.up_proj", *first)
    tensors |= of_module("model.layers.1.mlp.experts.3.up_proj", *last)
    folder = write_peft(
        tmp_path / "peft", tensors, rank=2, alpha=2.0, rank_pattern={r"experts\.3\.up_proj": 3}
    )
    file = decoder_file("qwen3moe", head_norms=True, experts=True)
    found = changes(open_adapter(folder, *opened(file, tmp_path)))["blk.1.ffn_up_exps.weight"]
    assert found.shape == (EXPERTS, HIDDEN, WIDTH)
    assert close(found[0], first[1] @ first[0])
    assert close(found[3], 2 / 3 * last[1] @ last[0])
    assert not found[1:3].any()


def test_an_embedding_and_a_head(tmp_path):
    a, b = factors(WIDTH, VOCABULARY)
    head = factors(VOCABULARY, WIDTH)
    tensors = {"model.embed_tokens.lora_embedding_A": a, "model.embed_tokens.lora_embedding_B": b}
    folder = write_peft(tmp_path / "peft", tensors | of_module("lm_head", *head), alpha=4.0)
    found = open_adapter(folder, *opened(decoder_file("llama"), tmp_path))
    (part,) = found.adapter.embeddings.values()
    assert close(unpack(part.a) @ unpack(part.b).T, (b @ a).T)
    assert close(changes(found)["output.weight"], head[1] @ head[0])


SCALES = {
    "plain": ({}, 8 / 4),
    "rank-stabilised": ({"use_rslora": True}, 8 / 2),
    "own alpha": ({"alpha_pattern": {"q_proj": 12}}, 12 / 4),
    "alpha of others": ({"alpha_pattern": {"k_proj": 12}}, 8 / 4),
    "a pattern": ({"alpha_pattern": {r"layers\.0\..*": 2}}, 2 / 4),
    "no part of a name": ({"alpha_pattern": {"proj": 2}}, 8 / 4),
    "own rank": ({"r": 16, "rank_pattern": {"self_attn.q_proj": 4}}, 8 / 4),
}


@pytest.mark.parametrize(("config", "factor"), SCALES.values(), ids=SCALES)
def test_scales(tmp_path, config, factor):
    a, b = factors(256, WIDTH)
    folder = write_peft(tmp_path / "peft", of_module(Q_PROJ, a, b), **({"alpha": 8.0} | config))
    found = open_adapter(folder, *opened(decoder_file("llama"), tmp_path))
    assert found.adapter.matrices[QUERY].factor == pytest.approx(factor)


def test_the_file_may_be_named_instead_of_its_directory(tmp_path):
    folder = write_peft(tmp_path / "peft", of_module(Q_PROJ, *factors(256, WIDTH)))
    base = opened(decoder_file("llama"), tmp_path)
    by_file = open_adapter(folder / "adapter_model.safetensors", *base)
    assert by_file.digest == open_adapter(folder, *base).digest


REFUSED_CONFIGS = {
    "peft_type": {"peft_type": "IA3"},
    "use_dora": {"use_dora": True},
    "bias": {"bias": "all"},
    "lora_bias": {"lora_bias": True},
    "modules_to_save": {"modules_to_save": ["lm_head"]},
    "fan_in_fan_out": {"fan_in_fan_out": True},
    "alora_invocation_tokens": {"alora_invocation_tokens": [1, 2]},
    "target_parameters": {"target_parameters": ["mlp.experts.gate_up_proj"]},
    "layer_replication": {"layer_replication": [[0, 1]]},
    "init_lora_weights": {"init_lora_weights": "pissa"},
    "something_of_2030": {"something_of_2030": 1},
    "use_rslora": {"use_rslora": "yes"},
    "lora_alpha": {"lora_alpha": None},
    "configuration says 5": {"r": 5},
    "rank_pattern": {"rank_pattern": {"(": 4}},
}


@pytest.mark.parametrize("name", REFUSED_CONFIGS)
def test_a_configuration_that_would_not_be_followed_is_refused(tmp_path, name):
    folder = write_peft(tmp_path / "peft", of_module(Q_PROJ, *factors(256, WIDTH)))
    config = json.loads((folder / "adapter_config.json").read_text()) | REFUSED_CONFIGS[name]
    (folder / "adapter_config.json").write_text(json.dumps(config))
    refused(folder, tmp_path, name)


def refused(path, folder, *named, file=None):
    with pytest.raises(ModelError) as caught:
        open_adapter(path, *opened(file or decoder_file("llama"), folder))
    for word in named:
        assert word in str(caught.value)


def test_a_pattern_that_never_ends_is_given_up(tmp_path):
    tensors = of_module(Q_PROJ, *factors(256, WIDTH))
    folder = write_peft(tmp_path / "peft", tensors, alpha_pattern={r"(?:[\w.]|[\w.])+[!?]": 1})
    refused(folder, tmp_path, "alpha_pattern")


TENSORS = {
    "no factor B": {f"{Q_PROJ}.lora_A.weight": np.ones((4, 256))},
    "rank 4 in its factor A and 3 in B": of_module(Q_PROJ, np.ones((4, 256)), np.ones((256, 3))),
    f"{QUERY}.lora_b has shape [255, 4]": of_module(Q_PROJ, np.ones((4, 256)), np.ones((255, 4))),
    f"{QUERY}.lora_a has shape [4, 128]": of_module(Q_PROJ, np.ones((4, 128)), np.ones((256, 4))),
    "blk.9.attn_q.weight is not in the model": of_module(
        "model.layers.9.self_attn.q_proj", np.ones((4, 256)), np.ones((256, 4))
    ),
    "module vision.blocks.0": of_module("vision.blocks.0", np.ones((4, 9)), np.ones((9, 4))),
    "lora_magnitude_vector": {f"{Q_PROJ}.lora_magnitude_vector": np.ones((4, 4))},
    "NaN": of_module(Q_PROJ, np.full((4, 256), np.nan), np.ones((256, 4))),
    "changes no matrix": {},
    "no matrix's": of_module(Q_PROJ, np.ones((4, 256, 1)), np.ones((256, 4))),
}


@pytest.mark.parametrize("named", TENSORS)
def test_tensors_that_do_not_fit_are_refused(tmp_path, named):
    refused(write_peft(tmp_path / "peft", TENSORS[named]), tmp_path, named)


def test_experts_that_the_model_has_not_are_refused(tmp_path):
    pair = factors(HIDDEN, WIDTH)
    folder = write_peft(tmp_path / "a", of_module("model.layers.0.mlp.experts.4.up_proj", *pair))
    file = decoder_file("qwen3moe", head_norms=True, experts=True)
    refused(folder, tmp_path, "expert 4 of blk.0.ffn_up_exps.weight", file=file)
    refused(folder, tmp_path, "no blk.0.ffn_up_exps.weight")


def test_files_that_are_none_are_refused(tmp_path):
    folder = write_peft(tmp_path / "peft", of_module(Q_PROJ, *factors(256, WIDTH)))
    tensors, config = folder / "adapter_model.safetensors", folder / "adapter_config.json"
    whole = tensors.read_bytes()
    for cut in (0, 7, 100, len(whole) - 1):
        tensors.write_bytes(whole[:cut])
        refused(folder, tmp_path, "no safetensors")
    save_file({f"base_model.model.{Q_PROJ}.lora_A.weight": np.ones((4, 256), np.int32)}, tensors)
    refused(folder, tmp_path, "is I32")
    tensors.write_bytes(whole)
    for text in ("", "{", "[]", "[" * 100_000):
        config.write_text(text)
        refused(folder, tmp_path, "adapter_config.json")
    config.unlink()
    refused(folder, tmp_path, "adapter_config.json")
    tensors.rename(folder / "adapter_model.bin")
    refused(folder, tmp_path, "only safetensors are read")
    refused(folder / "adapter_model.bin", tmp_path, "only safetensors are read")
    refused(tmp_path / "missing", tmp_path, "missing", "--lora")


# --- GGUF -----------------------------------------------------------------------------------------


@pytest.fixture
def adapter():
    return AdapterFile(decoder_file("llama"), [QUERY, "blk.1.ffn_down.weight"])


def test_words_of_an_adapter_are_read(tmp_path, adapter):
    adapter.metadata |= {"adapter.lora.task_name": "t", "adapter.lora.prompt_prefix": "p"}
    found = open_adapter(adapter.write(tmp_path / "a.gguf"), *opened(adapter.base, tmp_path))
    assert (found.task_name, found.prompt_prefix) == ("t", "p")


def test_the_digest_is_of_all_that_has_an_effect(tmp_path, adapter):
    base = opened(adapter.base, tmp_path)
    first = open_adapter(adapter.write(tmp_path / "a.gguf"), *base).digest
    assert open_adapter(adapter.write(tmp_path / "b.gguf"), *base).digest == first
    adapter.alpha += 1
    other = open_adapter(adapter.write(tmp_path / "c.gguf"), *base).digest
    adapter.alpha -= 1
    adapter.pairs[QUERY][1][-1, -1] += 1
    assert len({first, other, open_adapter(adapter.write(tmp_path / "d.gguf"), *base).digest}) == 3


METADATA = {
    "general.type": ({"general.type": "model"}, "'adapter'"),
    "adapter.type": ({"adapter.type": "control_vector"}, "only 'lora'"),
    "adapter.alora.invocation_tokens": ({"adapter.alora.invocation_tokens": [1, 2]}, "aLoRA"),
}


@pytest.mark.parametrize("key", METADATA)
def test_a_header_that_asks_for_something_else_is_refused(tmp_path, adapter, key):
    metadata, word = METADATA[key]
    adapter.metadata |= metadata
    refused(adapter.write(tmp_path / "a.gguf"), tmp_path, key, word)


@pytest.mark.parametrize("alpha", [float("nan"), float("inf"), -1e10])
def test_an_alpha_that_is_no_number_is_refused(tmp_path, adapter, alpha):
    adapter.alpha = alpha
    refused(adapter.write(tmp_path / "a.gguf"), tmp_path, "adapter.lora.alpha")


def test_an_adapter_of_another_architecture_is_refused(tmp_path, adapter):
    path = adapter.write(tmp_path / "a.gguf")
    refused(path, tmp_path, "'llama'", "'qwen2'", file=decoder_file("qwen2", biases=True))


def changed(adapter, name, a=None, b=None):
    old = adapter.pairs[name]
    adapter.pairs[name] = (old[0] if a is None else a, old[1] if b is None else b)


def test_pairs_that_do_not_fit_are_refused(tmp_path):
    def one(name=QUERY):
        return AdapterFile(decoder_file("llama"), [name])

    wrong_rank, wrong_width, bad = one(), one(), one()
    changed(wrong_rank, QUERY, a=np.ones((3, WIDTH)))
    refused(wrong_rank.write(tmp_path / "a"), tmp_path, f"{QUERY}.lora_a", "[3, 256]", "rank 4")
    changed(wrong_width, QUERY, b=np.ones((512, 4)))
    refused(wrong_width.write(tmp_path / "b"), tmp_path, f"{QUERY}.lora_b", "[512, 4]")
    bad.pairs[QUERY][1][5, 1] = np.inf
    refused(bad.write(tmp_path / "c"), tmp_path, f"{QUERY}.lora_b", "infinite")
    elsewhere = one()
    elsewhere.pairs["blk.7.attn_q.weight"] = elsewhere.pairs.pop(QUERY)
    refused(elsewhere.write(tmp_path / "d"), tmp_path, "blk.7.attn_q.weight is not in the model")
    norm = one()
    norm.pairs["output_norm.weight"] = np.ones((4, WIDTH)), np.ones((1, 4))
    refused(norm.write(tmp_path / "e"), tmp_path, "output_norm.weight", "does not multiply")
    turned = one(EMBEDDING)
    changed(turned, EMBEDDING, a=turned.pairs[EMBEDDING][0].T)
    refused(turned.write(tmp_path / "f"), tmp_path, f"{EMBEDDING}.lora_a")
    refused(AdapterFile(decoder_file("llama"), []).write(tmp_path / "g"), tmp_path, "no matrix")


def test_what_only_drafts_or_convolves_is_refused(tmp_path):
    file = hybrid_file()
    adapter = AdapterFile(file, ["blk.0.ssm_conv1d.weight"])
    path = adapter.write(tmp_path / "a.gguf")
    refused(path, tmp_path, "ssm_conv1d", "does not multiply", file=file)


def test_a_cut_file_is_refused(tmp_path, adapter):
    path = adapter.write(tmp_path / "a.gguf")
    whole = path.read_bytes()
    base = opened(adapter.base, tmp_path)
    for cut in (*range(0, 600, 37), len(whole) // 2, len(whole) - 40):
        path.write_bytes(whole[:cut])
        with pytest.raises(ModelError):
            open_adapter(path, *base)
