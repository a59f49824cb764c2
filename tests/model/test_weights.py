"""Goal: what a model lacks or has too much is said by name, before anything computes.

Method: tiny models as the writer writes them, then one thing of each taken away or changed.
"""

import numpy as np
import pytest

pytest.importorskip("gguf")
pytest.importorskip("ggml")

from synthetic import LAYERS, WIDTH, decoder_file

from phaseloop.model.gguf_file import ModelError
from phaseloop.model.load import load_model
from phaseloop.model.scales import F16_SCALES, is_bad
from phaseloop.model.weights import open_weights


def loaded(file, tmp_path):
    weights = open_weights(file.write(tmp_path / "model.gguf"))
    return load_model(weights)


def test_a_model_is_described(tmp_path):
    model = loaded(decoder_file("llama", "Q4_0"), tmp_path)
    assert model.architecture == "llama" and model.context_length == 512
    assert len(model.dimensions.ropes) == LAYERS


METADATA = {
    "missing": ("block_count", None, "key llama.block_count is missing"),
    "text": ("block_count", "two", "block_count is 'two', not an integer"),
    "zero": ("attention.head_count", 0, "head_count is 0, possible are"),
    "absurd": ("embedding_length", 4_000_000_000, "embedding_length is 4000000000"),
    "indivisible": ("attention.head_count_kv", 3, "does not divide the 4 heads"),
    "odd": ("rope.dimension_count", 33, "an odd number"),
    "nan": ("rope.freq_base", float("nan"), "rope.freq_base is nan"),
    "scaling": ("rope.scaling.type", "longrope", "'longrope', which is not supported"),
    "wide": ("feed_forward_length", 512, "its metadata demand [512, 256]"),
}


@pytest.mark.parametrize("name", METADATA)
def test_bad_metadata_are_named(tmp_path, name):
    key, value, message = METADATA[name]
    file = decoder_file("llama")
    if value is None:
        del file.metadata[key]
    else:
        file.metadata[key] = value
    with pytest.raises(ModelError) as caught:
        loaded(file, tmp_path)
    assert message in str(caught.value)


def test_a_missing_tensor_is_named(tmp_path):
    file = decoder_file("llama")
    del file.tensors["blk.1.ffn_down.weight"]
    with pytest.raises(ModelError, match=r"tensor blk\.1\.ffn_down\.weight is missing"):
        loaded(file, tmp_path)


def test_an_unknown_tensor_is_named(tmp_path):
    file = decoder_file("llama")
    file.vector("blk.0.attn_sinks", 4)
    with pytest.raises(ModelError, match=r"blk\.0\.attn_sinks is unknown to architecture llama"):
        loaded(file, tmp_path)


def test_an_unknown_architecture_is_named(tmp_path):
    with pytest.raises(ModelError, match="'gpt9' is not supported, supported are llama"):
        loaded(decoder_file("gpt9"), tmp_path)


def test_a_norm_must_be_f32(tmp_path):
    file = decoder_file("llama")
    file.tensors["output_norm.weight"] = np.ones(WIDTH), "F16"
    with pytest.raises(ModelError, match=r"output_norm\.weight is F16, only F32"):
        loaded(file, tmp_path)


@pytest.mark.parametrize("kind", ["F32", "BF16", "F16", "Q4_1", "Q6_K", "IQ1_M"])
def test_a_value_that_is_not_finite_is_found(tmp_path, kind):
    file = decoder_file("llama", kind)
    path = file.write(tmp_path / "model.gguf")
    open_weights(path).check_values()
    weights = open_weights(path)
    weight = weights.tensors["blk.1.attn_q.weight"]
    at = weight.data.ctypes.data - weights.tensors["token_embd.weight"].data.ctypes.data
    start = path.read_bytes().index(weights.tensors["token_embd.weight"].data.tobytes()) + at
    damaged = bytearray(path.read_bytes())
    damaged[start : start + weight.data.nbytes] = b"\xff" * weight.data.nbytes
    path.write_bytes(damaged)
    with pytest.raises(ModelError, match=r"blk\.1\.attn_q\.weight, block 0: .* NaN or infinite"):
        open_weights(path).check_values()


@pytest.mark.parametrize("kind", F16_SCALES)
def test_every_scale_of_a_block_is_looked_at(kind):
    gguf = pytest.importorskip("gguf")
    size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][1]
    for offset in F16_SCALES[kind]:
        blocks = np.zeros((3, size), np.uint8)
        blocks[1, offset + 1] = 0x7C  # infinity
        assert list(is_bad(blocks, kind)) == [False, True, False]


def test_parts_of_a_split_model_are_one(tmp_path):
    whole = decoder_file("llama", "Q8_0")
    names = list(whole.tensors)
    for number, chosen in enumerate((names[:5], names[5:])):
        part = decoder_file("llama", "Q8_0")
        part.tensors = {name: whole.tensors[name] for name in chosen}
        write_part(part, tmp_path / f"m-0000{number + 1}-of-00002.gguf", number, len(names))
    first = tmp_path / "m-00001-of-00002.gguf"
    together = open_weights(first)
    alone = open_weights(whole.write(tmp_path / "whole.gguf"))
    load_model(together)
    assert together.tensors.keys() == alone.tensors.keys()
    for name, weight in together.tensors.items():
        assert weight.data.tobytes() == alone.tensors[name].data.tobytes()
    with pytest.raises(ModelError, match="part 2 of a split model; name the first"):
        open_weights(tmp_path / "m-00002-of-00002.gguf")
    (tmp_path / "m-00002-of-00002.gguf").unlink()
    with pytest.raises(ModelError, match=r"m-00002-of-00002\.gguf: No such file"):
        open_weights(first)


def write_part(part, path, number, tensor_count):
    part.root = {"split.no": number, "split.count": 2, "split.tensors.count": tensor_count}
    part.write(path)
