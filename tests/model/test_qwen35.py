"""Goal: hybrids compute what their formulas say, on both backends, and broken files are refused.

Method: the recurrence against a closed form that solves for all rows at once; ggml against the
float64 reference on tiny random models; each variant and each convention of the files is shown to
move the answers by more than the tolerance; files with one key or tensor spoilt.
"""

import numpy as np
import pytest

pytest.importorskip("gguf")
pytest.importorskip("ggml")

from hybrid_files import CHANNELS, KEY_HEADS, STATE, VALUE_HEADS, hybrid_file
from synthetic import WIDTH
from test_against_reference import error, ggml, opened, reference

from phaseloop.model.gguf_file import ModelError
from phaseloop.model.load import load_model
from phaseloop.ops.reference import recur, unit

# As in test_against_reference, but a state sums up the rounding of all tokens before.
TOLERANCES = {"F32": 1e-5, "F16": 1e-4, "BF16": 1e-3}
TOLERANCE_QUANTISED = 3e-2
KINDS = ("F32", "F16", "BF16", "Q8_0", "Q5_0", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS")
VARIANTS = {
    "mixture": {"mixture": True},
    "fused": {"fused": True},
    "fused_mixture": {"mixture": True, "fused": True},
    "tied": {"tied": True},
    "interval": {"layers": 5, "full_attention_interval": 2},
    "listed": {"attention.recurrent_layers": [False, True, False, True]},
}


def hybrid(name, kind="F32"):
    return hybrid_file(kind, **VARIANTS[name])


# --- the recurrence -------------------------------------------------------------------------------


def test_the_recurrence_is_the_solution_of_its_equations():
    """A state is a sum of decayed u k^T, with u_t + b_t sum_{s<t} g_ts (k_t k_s) u_s = b_t v_t."""
    random = np.random.default_rng(2)
    rows, width = 40, 8
    convolved = random.standard_normal((rows, 3 * width))
    shrink, share = random.uniform(0.6, 1.0, (2, rows, 1))
    state = np.zeros((1, width, width))
    found = []
    for row in range(rows):
        state, output = recur(state, convolved[row], shrink[row], share[row], 1e-6)
        found.append(output[0])
    q, k, v = convolved[:, :width], convolved[:, width : 2 * width], convolved[:, 2 * width :]
    q, k = unit(q, 1e-6), unit(k, 1e-6)
    log_decay = np.cumsum(np.log(shrink))
    decay = np.tril(np.exp(log_decay[:, None] - log_decay))
    system = np.eye(rows) + np.tril(share * (k @ k.T) * decay, -1)
    u = np.linalg.solve(system, share * v)
    np.testing.assert_allclose(found, (decay * (q @ k.T)) @ u / np.sqrt(width), atol=1e-12)


def test_a_state_recalls_the_last_value_of_each_key():
    """Without decay and with full share, orthogonal keys are a dictionary."""
    width, state = 4, np.zeros((1, 4, 4))
    one, values = np.ones(1), np.arange(12.0).reshape(3, 4)
    for key, value in ((0, values[0]), (1, values[1]), (0, values[2])):
        channels = np.concatenate((np.eye(4)[1], np.eye(4)[key], value))
        state, output = recur(state, channels, one, one, 0.0)
    np.testing.assert_allclose(output[0], values[1] / np.sqrt(width))
    np.testing.assert_allclose(state[0, :, 0], values[2])


# --- whole models ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_every_weight_type(tmp_path, kind):
    weights, model = opened(hybrid_file(kind), tmp_path)
    tolerance = TOLERANCES.get(kind, TOLERANCE_QUANTISED)
    assert error(reference(weights, model), ggml(weights, model)) < tolerance


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_every_variant(tmp_path, name, kind):
    weights, model = opened(hybrid(name, kind), tmp_path)
    tolerance = TOLERANCES.get(kind, TOLERANCE_QUANTISED)
    assert error(reference(weights, model), ggml(weights, model)) < tolerance


@pytest.mark.parametrize("kernel", [2, 3])
def test_other_kernels(tmp_path, kernel):
    file = hybrid_file(**{"ssm.conv_kernel": kernel})
    for name, (values, kind) in file.tensors.items():
        if "conv1d" in name:
            file.tensors[name] = values[:, -kernel:], kind
    weights, model = opened(file, tmp_path)
    assert error(reference(weights, model), ggml(weights, model)) < TOLERANCES["F32"]


def moved(values, part):
    """The weights under another convention: what is read wrongly if a loader mistakes it."""
    match part:
        case "attn_q":  # queries and gates of all heads, one after the other
            return values.reshape(4, 2, 64, -1).transpose(1, 0, 2, 3).reshape(values.shape)
        case "attn_qkv":  # value heads beside each other that share a key head
            heads = values[2 * KEY_HEADS * STATE :].reshape(-1, KEY_HEADS, STATE, WIDTH)
            grouped = heads.transpose(1, 0, 2, 3).reshape(-1, WIDTH)
            return np.concatenate((values[: 2 * KEY_HEADS * STATE], grouped))
        case "ssm_a":
            return np.log(-values)
        case "ssm_conv1d":
            return values[:, ::-1]
        case "ssm_norm":
            return 1 + values
        case _:
            return np.roll(values, 1, axis=0)


CONVENTIONS = ("attn_q", "attn_qkv", "ssm_a", "ssm_conv1d", "ssm_norm", "ssm_dt", "ssm_beta")


@pytest.mark.parametrize("part", CONVENTIONS)
def test_another_convention_would_be_seen(tmp_path, part):
    file = hybrid_file()
    (tmp_path / "plain").mkdir()
    plain = reference(*opened(file, tmp_path / "plain"))
    for name, (values, kind) in file.tensors.items():
        if f".{part}." in f"{name}.":
            file.tensors[name] = moved(values, part), kind
    assert error(plain, reference(*opened(file, tmp_path))) > 10 * TOLERANCES["F16"]


def test_sections_change_nothing_for_text(tmp_path):
    (tmp_path / "plain").mkdir()
    plain = reference(*opened(hybrid_file(), tmp_path / "plain"))
    other = hybrid_file(**{"rope.dimension_sections": [8, 0, 0, 0]})
    assert reference(*opened(other, tmp_path)).tobytes() == plain.tobytes()


def test_a_draft_block_changes_nothing(tmp_path):
    (tmp_path / "plain").mkdir()
    plain = reference(*opened(hybrid_file(), tmp_path / "plain"))
    weights, model = opened(hybrid_file(draft=True), tmp_path)
    assert reference(weights, model).tobytes() == plain.tobytes()


# --- files that are refused -----------------------------------------------------------------------


def refusal(file, path):
    with pytest.raises(ModelError) as caught:
        load_model(opened(file, path)[0])
    return str(caught.value)


KEYS = {
    "ssm.conv_kernel": (1, 2.5, "four"),
    "ssm.inner_size": (0, 191, "192"),
    "ssm.state_size": (0, 31),
    "ssm.time_step_rank": (0, 5),
    "ssm.group_count": (0, 4),
    "rope.dimension_sections": ([3, 3, 2], [0, 0, 0, 0], [3, 3, 3, 0], [-1, 3, 3, 0], 8, "3"),
    "attention.value_length": (32,),
    "attention.recurrent_layers": ([True, False], [1, 1, 1, 0], [True] * 4, [False] * 4),
    "full_attention_interval": (1, 5, "4"),
    "nextn_predict_layers": (4, 5, "1"),
}


@pytest.mark.parametrize("key, value", [(key, v) for key, vs in KEYS.items() for v in vs])
def test_a_wrong_key_is_named(tmp_path, key, value):
    file = hybrid_file()
    file.metadata[key] = value
    message = refusal(file, tmp_path)
    assert str(tmp_path / "model.gguf") in message and ";" in message
    assert key in message or key.rsplit(".", 1)[-1] in message or "layer" in message


REQUIRED = [key for key in KEYS if key.startswith("ssm.")] + ["rope.dimension_sections"]


@pytest.mark.parametrize("key", REQUIRED)
def test_a_missing_key_is_named(tmp_path, key):
    file = hybrid_file()
    del file.metadata[key]
    assert f"key qwen35.{key} is missing" in refusal(file, tmp_path)


def test_a_mixture_needs_experts(tmp_path):
    file = hybrid_file(mixture=True)
    del file.metadata["expert_count"]
    assert "qwen35moe.expert_count" in refusal(file, tmp_path)


def test_a_file_of_the_draft_block_alone_is_told_apart(tmp_path):
    file = hybrid_file(draft=True)
    for name in list(file.tensors):
        if name.startswith(("blk.0.", "blk.1.", "blk.2.", "blk.3.")):
            del file.tensors[name]
    assert "only the block that drafts" in refusal(file, tmp_path)


OPTIONAL = ("output.weight", "blk.4.nextn.shared_head_norm.weight")


@pytest.mark.parametrize("mixture", [False, True])
def test_every_tensor_is_needed_in_its_shape_and_type(tmp_path, mixture):
    names = list(hybrid_file(mixture=mixture, draft=True).tensors)
    for name in names:
        if name not in OPTIONAL and name != "token_embd.weight":
            file = hybrid_file(mixture=mixture, draft=True)
            del file.tensors[name]
            message = refusal(file, tmp_path)
            is_first = name == "blk.0.attn_norm.weight"
            assert (f"tensor {name} is missing" in message) != is_first
        file = hybrid_file(mixture=mixture, draft=True)
        values, kind = file.tensors[name]
        file.tensors[name] = np.concatenate((values, values), axis=-1), kind
        assert name in refusal(file, tmp_path)
        if values.ndim == 1 or "conv1d" in name:
            file = hybrid_file(mixture=mixture, draft=True)
            file.tensors[name] = values, "F16"
            if "shexp" not in name:  # the shared expert's router is a matrix of one row
                assert f"tensor {name} is F16" in refusal(file, tmp_path)


def test_the_sizes_of_the_state_are_those_of_the_file(tmp_path):
    _, model = opened(hybrid_file(layers=8), tmp_path)
    sizes = model.dimensions.recurrence
    assert sizes is not None and sizes.channels == CHANNELS
    assert (sizes.layer_count, sizes.value_heads) == (6, VALUE_HEADS)
    assert len(model.dimensions.ropes) == 2


def test_lengths_get_the_epsilon_of_the_norms(tmp_path):
    _, model = opened(hybrid_file(**{"attention.layer_norm_rms_epsilon": 1e-4}), tmp_path)
    epsilons = {layer.mixer.spec.epsilon for layer in model.network.layers[:3]}
    assert epsilons == {float(np.float32(1e-4))}
