"""Goal: an engine file means what it says, and every mistake in one is named.

Method: presets are written and read back; then files with one mistake each.
"""

import pytest
from msgspec.structs import asdict

from phaseloop.engine.sim_fields import SettingError
from phaseloop.engine.sim_file import engine_toml, find_engine, read_engine
from phaseloop.engine.sim_presets import PRESETS


@pytest.mark.parametrize("name", PRESETS)
def test_a_written_engine_is_read_back(name, tmp_path):
    path = tmp_path / "engine.toml"
    path.write_text(engine_toml(PRESETS[name].model, ("a comment",)))
    assert read_engine(path) == PRESETS[name].model
    assert find_engine(str(path)) == PRESETS[name].model


@pytest.mark.parametrize("name", PRESETS)
def test_every_parameter_has_a_source_and_every_source_a_parameter(name):
    preset = PRESETS[name]
    values = {**asdict(preset.model.cost), "accept_ppm": preset.model.capacity.accept_ppm}
    assert {parameter for parameter, value in values.items() if value} == set(preset.sources)
    assert all(len(source) > 15 for source in preset.sources.values())


def test_what_is_left_out_has_its_default(tmp_path):
    path = tmp_path / "engine.toml"
    path.write_text('name = "x"\n[cost]\nprefill_token_ns = 5\ndecode_row_ns = 7\n')
    model = read_engine(path)
    assert (model.name, model.capacity.slot_count, model.cost.decode_round_ns) == ("x", 4, 0)


GOOD = 'name = "x"\n[cost]\nprefill_token_ns = 5\ndecode_row_ns = 7\n'


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "name is missing"),
        ("name = 3", "name = 3: must be a text"),
        ('name = "x"', "cost is missing"),
        ('name = "x"\ncost = 4', "cost = 4: must be a table"),
        (GOOD.replace("5", "-5"), r"cost.prefill_token_ns = -5: must be from 0 to"),
        (GOOD.replace("5", "5.5"), r"cost.prefill_token_ns = 5.5: must be an integer"),
        (GOOD.replace("5", "true"), r"cost.prefill_token_ns = true: must be an integer"),
        (GOOD + "decode_rows_ns = 1", "cost: unknown key 'decode_rows_ns'; did you mean 'decode_r"),
        (GOOD + "[capacity]\nslot_count = 0", "capacity.slot_count = 0: must be from 1 to 4096"),
        (GOOD + "[capacity]\ncan_save = 1", "capacity.can_save = 1: must be true or false"),
        (GOOD + "[capacity]\naccept_ppm = 1000001", "capacity.accept_ppm = 1000001: must be from"),
        ("engine = 1\n" + GOOD, r"unknown key 'engine'.*known: name"),
        (GOOD.replace("7", "0"), "cost: prompts and tokens must take time"),
        ("name = ", r"not TOML: .*line 1"),
    ],
)
def test_mistakes_are_named(content, message, tmp_path):
    path = tmp_path / "engine.toml"
    path.write_text(content)
    with pytest.raises(SettingError, match=message) as error:
        read_engine(path)
    assert str(error.value).startswith(str(path))


def test_an_unknown_engine_is_answered_with_those_there_are():
    with pytest.raises(SettingError, match=r"did you mean 'v100x4-qwen27b'.*cpu-smollm2"):
        find_engine("v100x4-qwen-27b")


def test_a_missing_file_is_named():
    with pytest.raises(SettingError, match=r"nowhere.toml: No such file"):
        find_engine("nowhere.toml")
