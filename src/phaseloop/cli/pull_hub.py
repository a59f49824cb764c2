"""Models of the Hugging Face hub, through huggingface_hub: the extra `hub`.

They lie in the cache that the hub's own tools and llama-server use, so what one has downloaded the
others find.  Interrupted downloads go on where they stopped.
"""

from pathlib import Path
from typing import Protocol, cast

from .errors import UserError
from .model_cache import HubName, choose_files, is_first_of_model
from .pull_progress import say

FILES_SHOWN_MAX = 40


class Hub(Protocol):
    """What is used of huggingface_hub."""

    def list_repo_files(self, repo_id: str, *, token: str | None) -> list[str]: ...
    def hf_hub_download(self, repo_id: str, filename: str, *, token: str | None) -> str: ...


try:
    import huggingface_hub

    found = cast(Hub, huggingface_hub)  # a module, with these as functions
except ImportError:
    found = None
HUB: Hub | None = found


def fetch_from_hub(
    name: HubName, file: str | None = None, *, token: str | None = None, hub: Hub | None = HUB
) -> Path:
    """Download a model's files unless they are there; gives the first one.

    `file` names one instead of the quant.  Without a token huggingface_hub takes HF_TOKEN, or what
    was logged in with.  Raises UserError.
    """
    if hub is None:
        raise UserError(
            f"{name.repository}: the hub needs huggingface_hub, which is not installed; "
            "`pip install 'phaseloop[hub]'` does, and -m takes any GGUF file"
        )
    try:
        files = hub.list_repo_files(name.repository, token=token)
        chosen = choose_files(files, name.quant, file)
        if not chosen:
            raise UserError(nothing_fits(name, file, files))
        paths = [fetch_file(hub, name.repository, part, token) for part in chosen]
    except UserError:
        raise
    except Exception as error:  # those of the library, of its HTTP client, of the system
        raise UserError(problem_of(error, name.repository)) from error
    return paths[0]


def fetch_file(hub: Hub, repository: str, file: str, token: str | None) -> Path:
    say(f"{repository}: {file}")  # on a terminal, huggingface_hub draws a bar under it
    return Path(hub.hf_hub_download(repository, file, token=token))


def nothing_fits(name: HubName, file: str | None, files: list[str]) -> str:
    models = [found for found in sorted(files) if is_first_of_model(found)]
    if not models:
        return f"{name.repository} has no GGUF files; those of others often end with -GGUF"
    wanted = f"no file {file!r}" if file is not None else f"no {name.quant!r}"
    shown = ", ".join(models[:FILES_SHOWN_MAX])
    more = f" and {len(models) - FILES_SHOWN_MAX} more" if len(models) > FILES_SHOWN_MAX else ""
    return f"{name.repository} has {wanted}, or not all of its parts; there are {shown}{more}"


def problem_of(error: Exception, repository: str) -> str:
    """By name, since the library is not there for everybody to import its errors from."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    if "GatedRepoError" in kinds:
        return (
            f"{repository} is gated: accept its terms on https://huggingface.co/{repository}, "
            "and set HF_TOKEN to a token of that account"
        )
    if "RepositoryNotFoundError" in kinds:
        return f"{repository}: no such repository, or a private one, which takes HF_TOKEN"
    said = (str(error).strip() or type(error).__name__).splitlines()[0]
    return f"{repository}: could not be downloaded: {said}; pull again to go on where it stopped"
