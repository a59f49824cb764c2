"""Goal: `phaseloop doctor` names each thing that is wrong in one line with a remedy, and no others.

Method: facts of a machine where all is well, changed in one place per case, since what is a problem
is a pure function of facts; the probes against a driver of our own, children that die and hang, and
this machine as it is.
"""

import json
import sys
from importlib.metadata import PackageNotFoundError

import pytest
from msgspec.structs import replace

from phaseloop.cli import doctor, doctor_gpus, doctor_probe
from phaseloop.cli.doctor_facts import (
    Disk,
    Facts,
    Failure,
    Ggml,
    Gpus,
    KernelCache,
    Toolkit,
    Tried,
)
from phaseloop.cli.doctor_judge import problems
from phaseloop.cli.doctor_packages import Package, Python, fault_of, packages
from phaseloop.cli.doctor_probe import answer_of, disk_of
from phaseloop.cli.main import main
from phaseloop.kernels import nvrtc, sources
from phaseloop.kernels.contract import KernelError
from phaseloop.kernels.driver import Driver, Gpu
from phaseloop.kernels.peers import Pair

GIB = 1 << 30
V100 = Gpu(0, "Tesla V100-SXM2-16GB", (7, 0), 16 * GIB, 15 * GIB, ())
WELL = Facts(
    phaseloop="0.1.0",
    system="Linux",
    python=Python("3.12.1", ">=3.11", is_good=True),
    packages=(Package("numpy", "<3,>=2.4", None, "2.4.6", None),),
    ggml=Ggml("0.0.45", "0.15.3", ("avx2",), 8, ("F16",), ()),
    driver=Driver("575.57.08", (12, 9), (V100,)),
    toolkit=Toolkit("12.9", (50, 70, 90), "include"),
    cupy_packages=("cupy-cuda12x 14.2.0",),
    gpus=Gpus("14.2.0", "12.9", (Tried(0, V100.name, None),), ()),
    has_nvidia_module=True,
    kernel_cache=KernelCache("kernels", 3, 1000),
    compiler="g++ 12.2.0",
    model_cache=Disk("models", 100 * GIB),
)
NO_GPU = replace(
    WELL, driver=Failure("libcuda.so.1 cannot be loaded"), toolkit=Failure("NVRTC is missing"),
    cupy_packages=(), gpus=None, has_nvidia_module=False,
)  # fmt: skip


def test_a_machine_where_all_is_well_has_no_problems():
    assert problems(WELL) == ()


def test_nobody_needs_a_gpu():
    assert problems(NO_GPU) == ()


FATAL = {
    "an old Python": (
        {"python": Python("3.10.2", ">=3.11", is_good=False)},
        "Python: 3.10.2 is not >=3.11: install a newer Python",
    ),
    "a missing package": (
        {"packages": (Package("starlette", "<2,>=1.10", None, None, "missing"),)},
        "starlette: missing, wanted is <2,>=1.10: pip install --upgrade 'phaseloop'",
    ),
    "an old package": (
        {"packages": (Package("numpy", "<3,>=2.4", None, "1.26", "too old"),)},
        "numpy: 1.26 is too old, wanted is <3,>=2.4: pip install --upgrade 'phaseloop'",
    ),
    "no ggml": (
        {"ggml": Failure("it is not installed: pip install 'phaseloop[cpu]'")},
        "ggml: it is not installed: pip install 'phaseloop[cpu]'",
    ),
    "ggml for another CPU": (
        {"ggml": Failure("it was ended by signal 4")},
        "ggml: it was ended by signal 4, an instruction that this CPU lacks: pip install",
    ),
}
OTHER = {
    "a new package": (
        {"packages": (Package("rich", "<16,>=15", None, "16.0", "newer than tested"),)},
        "rich: 16.0 is newer than tested",
    ),
    "unstable rows": (
        {"ggml": replace(WELL.ggml, unstable=("Q4_K",))},
        "ggml: answers of models in Q4_K may differ",
    ),
    "a full disk": ({"model_cache": Disk("models", GIB)}, "disk: 1.0 GiB are free in models: make"),
    "a missing driver": (
        {"driver": Failure("libcuda.so.1 cannot be loaded: install NVIDIA's driver"), "gpus": None},
        "driver: libcuda.so.1 cannot be loaded: install NVIDIA's driver",
    ),
    "no visible GPU": (
        {"driver": Driver("575", (12, 9), ()), "gpus": None},
        "driver: it sees no GPU: look at `nvidia-smi -L`",
    ),
    "a toolkit that is too new": (
        {"toolkit": Toolkit("13.5", (75, 90, 121), "include")},
        "NVRTC: 13.5 compiles for compute capabilities 7.5 to 12.1, not for Tesla "
        "V100-SXM2-16GB with 7.0: pip install 'phaseloop[cuda]'",
    ),
    "a toolkit that is too old": (
        {"driver": Driver("575", (12, 9), (replace(V100, compute=(12, 0)),))},
        "NVRTC: 12.9 compiles for compute capabilities 5.0 to 9.0, not for Tesla "
        "V100-SXM2-16GB with 12.0: install a newer NVRTC",
    ),
    "a missing header": (
        {"toolkit": Toolkit("12.9", (70,), Failure("cuda_fp16.h is missing: pip install it"))},
        "NVRTC: cuda_fp16.h is missing: pip install it",
    ),
    "no CuPy": (
        {"cupy_packages": (), "gpus": None},
        "CuPy: it is not installed, so GPUs cannot be used: pip install 'phaseloop[cuda]'",
    ),
    "two CuPys": (
        {"cupy_packages": ("cupy-cuda12x 14.2.0", "cupy-cuda13x 14.2.0")},
        "CuPy: cupy-cuda12x 14.2.0 and cupy-cuda13x 14.2.0 overwrite each other: pip uninstall "
        "cupy-cuda12x cupy-cuda13x, then pip",
    ),
    "a GPU without memory": (
        {"driver": Driver("575", (12, 9), (replace(V100, free_bytes=GIB // 2),))},
        "GPU 0: 0.5 GiB of 16.0 GiB are free: another process holds the rest, `nvidia-smi`",
    ),
    "a GPU that computes wrong": (
        {"gpus": replace(WELL.gpus, devices=(Tried(0, "V100", "a kernel computed nonsense"),))},
        "GPU 0: a kernel computed nonsense",
    ),
    "CuPy that hangs": (
        {"gpus": Failure("no answer within 120 s; it hangs, and was ended")},
        "CuPy: the GPUs cannot be used: no answer within 120 s",
    ),
    "peers that corrupt": (
        {"gpus": replace(WELL.gpus, pairs=(Pair(0, 1, "corrupt", "9 bytes arrive changed"),))},
        "GPUs 0 to 1: 9 bytes arrive changed: leave 0:1 out of --peer-access",
    ),
    "a kernel cache that cannot be written": (
        {"kernel_cache": Failure("kernels: cannot keep built kernels there")},
        "kernel cache: kernels: cannot keep built kernels there",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", [*FATAL, *OTHER])
def test_each_fault_is_one_problem(case):
    change, text = {**FATAL, **OTHER}[case]
    (problem,) = problems(replace(WELL, **change))
    assert f"{problem.about}: {problem.text}".startswith(text)
    assert problem.is_fatal == (case in FATAL)


def test_pairs_that_nobody_allowed_are_no_problem():
    pairs = (Pair(0, 1, "not allowed", ""), Pair(1, 0, "impossible", ""), Pair(0, 2, "used", ""))
    assert problems(replace(WELL, gpus=replace(WELL.gpus, pairs=pairs))) == ()


@pytest.mark.parametrize(("change", "code"), [({}, 0), (FATAL["no ggml"][0], 1)])
def test_exit_code_and_text(monkeypatch, capsys, change, code):
    monkeypatch.setattr(doctor, "examine", lambda peers: replace(WELL, **change))
    assert main(["doctor"]) == code
    out = capsys.readouterr().out
    assert "Tesla V100-SXM2-16GB, compute capability 7.0, 16.0 GiB, of which 15.0 GiB free" in out
    assert "a kernel was compiled, run, and right" in out
    assert ("BROKEN: ggml: it is not installed" in out) == (code == 1)
    assert ("the CPU engine works; no problems" in out) == (code == 0)


def test_this_machine_can_serve(capsys):
    """The tests need what serve needs; ggml's own process answers."""
    code = main(["doctor", "--json", "--peer-access", "none"])
    found = json.loads(capsys.readouterr().out)
    assert code == 0
    assert found["can_serve"]
    assert found["facts"]["ggml"]["threads"] >= 1
    assert {"F16", "Q8_0", "Q4_K"} <= {*found["facts"]["ggml"]["stable"]} | {
        *found["facts"]["ggml"]["unstable"]
    }
    assert not [one for one in found["problems"] if one["is_fatal"]]


def test_bad_pairs_are_refused(capsys):
    assert main(["doctor", "--peer-access", "0-1"]) == 2
    assert "neither all, none, nor pairs" in capsys.readouterr().err


def test_the_kernel_cache_is_cleared_of_what_was_built(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PHASELOOP_KERNEL_CACHE", str(tmp_path))
    for name in ("norm-1.cubin", "machine-2.so", "notes.txt"):
        (tmp_path / name).write_bytes(bytes(1 << 20))
    assert doctor_probe.kernel_cache_of() == KernelCache(str(tmp_path), 2, 2 << 20)
    assert main(["doctor", "--clear-cache"]) == 0
    assert capsys.readouterr().out == "2 files removed, 2.0 MiB\n"
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    (tmp_path / "file").touch()
    monkeypatch.setenv("PHASELOOP_KERNEL_CACHE", str(tmp_path / "file"))
    assert main(["doctor", "--clear-cache"]) == 2
    assert "the kernel cache cannot be cleared" in capsys.readouterr().err
    assert "PHASELOOP_KERNEL_CACHE" in doctor_probe.kernel_cache_of().why


# --- probes ---------------------------------------------------------------------------------------


CHILDREN = {
    "killed": ("import os; os.kill(os.getpid(), 4)", "it was ended by signal 4"),
    "failed": ("raise SystemExit('the last line')", "the last line"),
    "silent": ("raise SystemExit(3)", "exit code 3"),
}


@pytest.mark.parametrize("how", CHILDREN)
def test_children_that_end_badly_are_told(tmp_path, monkeypatch, how):
    text, told = CHILDREN[how]
    (tmp_path / "badly.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert answer_of("badly", [], Ggml) == Failure(told)


def test_a_child_that_hangs_is_ended(tmp_path, monkeypatch):
    (tmp_path / "hangs.py").write_text("import signal; signal.pause()")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = answer_of("hangs", [], Ggml, seconds=0.5)
    assert found == Failure("no answer within 0 s; it hangs, and was ended")


def test_a_missing_header_and_a_missing_nvrtc_are_told(monkeypatch):
    def missing():
        raise KernelError("cuda_fp16.h is missing: pip install it")

    monkeypatch.setattr(nvrtc, "include_directories", missing)
    assert doctor_probe.toolkit_of().headers == Failure("cuda_fp16.h is missing: pip install it")
    monkeypatch.setattr(nvrtc, "version", missing)
    assert doctor_probe.toolkit_of() == Failure("cuda_fp16.h is missing: pip install it")


def test_free_space_is_that_of_where_it_would_be(tmp_path):
    found = disk_of(tmp_path / "not" / "there")
    assert found.directory.endswith("there")
    assert found.free_bytes > 0


def test_versions_stand_beside_their_bounds():
    versions = {"anyio": "4.16.0", "numpy": "1.26", "rich": "16.0", "ggml-python": "0.0.45"}

    def find(name):
        if name not in versions:
            raise PackageNotFoundError(name)
        return versions[name]

    required = [
        "anyio<5,>=4.16", "numpy<3,>=2.4", "rich<16,>=15.0", "starlette<2,>=1.10",
        "ggml-python==0.0.45; extra == 'cpu'", "cupy-cuda12x<15,>=14.2; extra == 'cuda'",
        "pyright[nodejs]<2,>=1.1; extra == 'dev'",
    ]  # fmt: skip
    assert [(one.name, one.extra, one.fault) for one in packages(required, find)] == [
        ("anyio", None, None),
        ("numpy", None, "too old"),
        ("rich", None, "newer than tested"),
        ("starlette", None, "missing"),
        ("ggml-python", "cpu", None),
        ("cupy-cuda12x", "cuda", None),
    ]
    assert [fault_of(found, "==0.0.45") for found in ("0.0.44", "0.0.45", "0.0.46")] == [
        "too old", None, "newer than tested",
    ]  # fmt: skip
    assert fault_of("2026.11.19", "<2027,>=2026.11.19") is None
    assert fault_of("3.0.0rc1", "<3,>=2.4") == "newer than tested"


# --- the child that tries GPUs --------------------------------------------------------------------


@pytest.fixture
def machine(monkeypatch):
    monkeypatch.syspath_prepend(str(sources.source_directory().parent / "tests" / "kernels"))
    double = __import__("cupy_double")
    monkeypatch.setattr("phaseloop.kernels.cupy_device.cubin", double.fake_cubin)
    yield double.Machine(2, reaches={(0, 1), (1, 0)}, corrupts={(1, 0)})
    sys.modules.pop("cupy_double")


def test_gpus_run_a_kernel_and_peers_are_tried(machine):
    found = doctor_gpus.examined(machine, "all")
    assert [one.failure for one in found.devices] == [None, None]
    assert [(one.source, one.target, one.state) for one in found.pairs] == [
        (0, 1, "used"), (1, 0, "corrupt"),
    ]  # fmt: skip
    assert (found.cupy, found.cuda) == ("14.2.0", "12.9")


def test_a_gpu_without_memory_is_told_and_the_others_are_tried(machine):
    machine.free_bytes[0] = 100
    first, second = doctor_gpus.examined(machine, "none").devices
    assert "out of memory" in first.failure
    assert second.failure is None


def test_a_cupy_that_gave_the_gpu_up_is_told(machine):
    machine.cuda_version = 13020
    found = doctor_gpus.examined(machine, "none")
    assert all("pip uninstall cupy-cuda13x" in one.failure for one in found.devices)


def test_wrong_results_are_told(machine):
    machine.host = type("Wrong", (), {"run": lambda self, launch: None})()
    found = doctor_gpus.examined(machine, "none")
    assert "computed something else" in found.devices[0].failure
