"""Goal: of a hub's repository the right files are fetched, found again, and problems are explained.

Method: a hub in memory that fills the real cache's layout, which huggingface_hub must be able
to read; and lists of files like those of real repositories, with llama-server's choices.
"""

import hashlib

import huggingface_hub
import pytest

from phaseloop.cli import main, models, pull_hub
from phaseloop.cli.errors import UserError
from phaseloop.cli.model_cache import HubName, choose_files, find_local, pulled_from_hub
from phaseloop.cli.pull_hub import fetch_from_hub

COMMIT = "0123456789abcdef0123456789abcdef01234567"
BIG = [f"Q8_0/m-Q8_0-0000{part}-of-00003.gguf" for part in (1, 2, 3)]
FILES = ["README.md", "m-IQ4_XS.gguf", "m-Q4_K_M.gguf", "m-Q4_K_S.gguf", "mmproj-m-Q8_0.gguf", *BIG]


class FakeHub:
    """A hub with one repository; downloads as huggingface_hub lays them down."""

    def __init__(self, cache, files=FILES, problem=None):
        self.base = cache / "models--org--some-model"
        self.files, self.problem = files, problem
        self.fetched, self.tokens = [], []

    def list_repo_files(self, repo_id, *, token):
        self.tokens.append(token)
        if self.problem is not None:
            raise self.problem
        assert repo_id == "org/some-model"
        return list(self.files)

    def hf_hub_download(self, repo_id, filename, *, token):
        self.fetched.append(filename)
        self.tokens.append(token)
        blob = self.base / "blobs" / hashlib.sha256(filename.encode()).hexdigest()
        path = self.base / "snapshots" / COMMIT / filename
        for place in (blob, path, self.base / "refs" / "main"):
            place.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(b"GGUF" * 500)
        if not path.is_symlink():
            path.symlink_to(blob)
        (self.base / "refs" / "main").write_text(COMMIT)
        return str(path)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("PHASELOOP_CACHE", str(tmp_path / "own"))
    return tmp_path / "hub"


NAME = HubName("org/some-model", None)

CHOICES = {
    "the usual one": (FILES, None, None, ["m-Q4_K_M.gguf"]),
    "the other usual one": (["a-Q2_K.gguf", "m-q8_0.gguf"], None, None, ["m-q8_0.gguf"]),
    "else the first": (["mmproj-a.gguf", "b.gguf", "a-F16.gguf"], None, None, ["a-F16.gguf"]),
    "one asked for, in any case": (FILES, "q4_k_s", None, ["m-Q4_K_S.gguf"]),
    "not one that begins like it": (["m-Q4_K_M.gguf"], "Q4_K", None, []),
    "all parts": (FILES, "Q8_0", None, BIG),
    "parts, one of them missing": (BIG[:2], "Q8_0", None, []),
    "none like it": (FILES, "Q6_K", None, []),
    "a file": (FILES, "Q8_0", "m-IQ4_XS.gguf", ["m-IQ4_XS.gguf"]),
    "a file of several": (FILES, None, BIG[0], BIG),
    "a file that is not there": (FILES, None, "n.gguf", []),
    "a quant that is a pattern": (FILES, ".*", None, []),
    "no model": (["README.md", "imatrix-Q4_K_M.gguf"], None, None, []),
}


@pytest.mark.parametrize(("files", "quant", "file", "chosen"), CHOICES.values(), ids=CHOICES)
def test_which_files_are_chosen(files, quant, file, chosen):
    assert list(choose_files(files, quant, file)) == chosen


def test_names_of_the_hub():
    assert HubName.parse("a-b/c.d_1:Q4_K_M") == HubName("a-b/c.d_1", "Q4_K_M")
    assert HubName.parse("a/b") == HubName("a/b", None)
    for wrong in ("a", "a/b/c", "a/b:", "/b", "a/b:c:d", "a b/c", ""):
        with pytest.raises(UserError, match=r"names no repository"):
            HubName.parse(wrong)


def test_a_model_is_fetched_and_found_again(cache, capsys):
    hub = FakeHub(cache)
    path = fetch_from_hub(NAME, token="secret", hub=hub)
    assert hub.fetched == ["m-Q4_K_M.gguf"]
    assert set(hub.tokens) == {"secret"}
    assert capsys.readouterr().err == "org/some-model: m-Q4_K_M.gguf\n"
    assert find_local(NAME, None) == path
    assert find_local(HubName(NAME.repository, "q4_k_m"), None) == path
    assert find_local(NAME, "m-Q4_K_M.gguf") == path
    assert find_local(HubName(NAME.repository, "Q8_0"), None) is None
    assert find_local(HubName("org/other", None), None) is None


def test_of_a_split_model_all_parts_are_fetched(cache):
    hub = FakeHub(cache)
    path = fetch_from_hub(HubName(NAME.repository, "Q8_0"), hub=hub)
    assert hub.fetched == BIG
    assert path.name == "m-Q8_0-00001-of-00003.gguf"
    path.with_name("m-Q8_0-00002-of-00003.gguf").unlink()
    assert find_local(HubName(NAME.repository, "Q8_0"), None) is None


def test_the_list_names_each_model_once(cache, capsys):
    hub = FakeHub(cache)
    for quant in ("Q8_0", "Q4_K_M"):
        fetch_from_hub(HubName(NAME.repository, quant), hub=hub)
    assert [(model.name, model.length) for model in pulled_from_hub()] == [
        ("org/some-model:Q8_0", 6_000),
        ("org/some-model:Q4_K_M", 2_000),
    ]
    for model in pulled_from_hub():
        assert models.resolve(model.name) == model.path
    capsys.readouterr()
    assert main.main(["pull", "--list"]) == 0
    assert capsys.readouterr().out.split("\n")[1].startswith("org/some-model:Q4_K_M  2.0 kB  ")


def test_the_layout_is_the_librarys(cache):
    """What the fake writes, huggingface_hub reads; so what that writes, we read."""
    path = fetch_from_hub(NAME, hub=FakeHub(cache))
    (repository,) = huggingface_hub.scan_cache_dir(cache).repos
    (revision,) = repository.revisions
    assert repository.repo_id == "org/some-model"
    assert revision.refs == {"main"}
    assert [file.file_path for file in revision.files] == [path]


# --- what can go wrong ----------------------------------------------------------------------------


def refused(hub, name=NAME, file=None):
    with pytest.raises(UserError) as caught:
        fetch_from_hub(name, file, hub=hub)
    return str(caught.value)


def test_without_the_extra(cache):
    message = refused(None)
    assert "`pip install 'phaseloop[hub]'` does" in message


def test_nothing_that_fits(cache):
    hub = FakeHub(cache)
    message = refused(hub, HubName(NAME.repository, "Q6_K"))
    assert message.startswith("org/some-model has no 'Q6_K', or not all of its parts; there are ")
    assert message.endswith(
        "Q8_0/m-Q8_0-00001-of-00003.gguf, m-IQ4_XS.gguf, m-Q4_K_M.gguf, m-Q4_K_S.gguf"
    )
    assert "has no file 'n.gguf'" in refused(hub, file="n.gguf")
    assert "has no GGUF files" in refused(FakeHub(cache, files=["model.safetensors"]))
    many = FakeHub(cache, files=[f"m-{index:03}.gguf" for index in range(50)])
    assert refused(many, HubName(NAME.repository, "Q6_K")).endswith("m-039.gguf and 10 more")
    assert hub.fetched == []


PROBLEMS = {
    "GatedRepoError": "org/some-model is gated: accept its terms on https://huggingface.co/org/",
    "RepositoryNotFoundError": "org/some-model: no such repository, or a private one, which takes",
    "HfHubHTTPError": "org/some-model: could not be downloaded: said; pull again to go on",
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_problems_of_the_hub_are_explained(cache, name):
    """With the library's own kinds of errors, whose constructors want a response."""
    kind = getattr(huggingface_hub.errors, name)
    error = kind.__new__(kind)
    error.args = ("said\nand more",)
    assert refused(FakeHub(cache, problem=error)).startswith(PROBLEMS[name])


def test_problems_of_the_network_are_explained(cache):
    assert "could not be downloaded: ConnectionError; pull again" in refused(
        FakeHub(cache, problem=ConnectionError())
    )


# --- resolving names ------------------------------------------------------------------------------


def unresolved(*args, **kwargs):
    with pytest.raises(UserError) as caught:
        models.resolve(*args, **kwargs)
    return str(caught.value)


def test_a_path_is_itself(cache, tmp_path):
    path = tmp_path / "a.gguf"
    path.touch()
    assert models.resolve(str(path)) == path
    assert "is a directory" in unresolved(str(tmp_path))


def test_hf_takes_what_is_there_and_else_pulls(cache, monkeypatch):
    hub = FakeHub(cache)
    monkeypatch.setattr(models, "fetch_from_hub", lambda *a, **k: fetch_from_hub(*a, **k, hub=hub))
    path = models.resolve(None, NAME.repository, hf_token="secret")
    assert hub.fetched == ["m-Q4_K_M.gguf"]
    assert set(hub.tokens) == {"secret"}
    assert models.resolve(None, NAME.repository) == path
    assert models.resolve(None, NAME.repository, offline=True) == path
    assert models.resolve(None, NAME.repository, "m-IQ4_XS.gguf").name == "m-IQ4_XS.gguf"
    assert hub.fetched == ["m-Q4_K_M.gguf", "m-IQ4_XS.gguf"]


def test_what_does_not_resolve(cache, monkeypatch):
    monkeypatch.setattr(models, "fetch_from_hub", None)  # never called here
    assert unresolved(None).startswith("no model: -m takes a GGUF file or a pulled name; nothing ")
    assert unresolved("smollm2-135m") == (
        "smollm2-135m is not there yet: phaseloop pull smollm2-135m fetches it"
    )
    assert "is smollm2-135m meant?" in unresolved("smollm2-135")
    assert "no such file, and no model of that name" in unresolved("/nowhere.gguf")
    assert "name two models" in unresolved("a", "b/c")
    assert "wants -hf" in unresolved("a", hf_file="b")
    fetch_from_hub(NAME, hub=FakeHub(cache))
    offline = unresolved(None, "org/other:Q8_0", offline=True)
    assert offline.startswith("--offline, and org/other:Q8_0 was not pulled before; pulled are ")
    assert offline.endswith("org/some-model:Q4_K_M")


def test_hub_is_what_is_installed():
    assert pull_hub.HUB is huggingface_hub
