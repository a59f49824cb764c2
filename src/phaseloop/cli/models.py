"""From what a command line says about the model to its file."""

import difflib
from pathlib import Path

from .errors import UserError
from .model_cache import HubName, Pulled, find_local, pulled_from_hub
from .pull_hub import fetch_from_hub
from .pull_wheel import WHEEL_MODELS, find_wheel_model, pulled_wheels

PULLED_SHOWN_MAX = 20


def pulled() -> list[Pulled]:
    """All models in the caches that `-m` takes by name."""
    return [*pulled_wheels(), *pulled_from_hub()]


def resolve(
    model: str | None,
    hf_repo: str | None = None,
    hf_file: str | None = None,
    offline: bool = False,
    hf_token: str | None = None,
) -> Path:
    """The file that -m, or -hf with --hf-file, means; a split model's first one.

    -m takes a path, or the name of what was pulled before.  -hf takes what is there, and else pulls
    it unless offline.  Raises UserError.
    """
    if model is not None and hf_repo is not None:
        raise UserError(f"-m {model} and -hf {hf_repo} name two models; leave one out")
    if hf_repo is not None:
        return from_hub(HubName.parse(hf_repo), hf_file, offline, hf_token)
    if hf_file is not None:
        raise UserError(f"--hf-file {hf_file} wants -hf USER/MODEL, whose file it is")
    if model is None:
        raise UserError(f"no model: -m takes a GGUF file or a pulled name; {what_is_there()}")
    return by_name(model)


def from_hub(name: HubName, file: str | None, offline: bool, token: str | None) -> Path:
    found = find_local(name, file)
    if found is not None:
        return found
    if offline:
        quant = "" if name.quant is None else f":{name.quant}"
        wanted = file or f"{name.repository}{quant}"
        raise UserError(f"--offline, and {wanted} was not pulled before; {what_is_there()}")
    return fetch_from_hub(name, file, token=token)


def by_name(name: str) -> Path:
    path = Path(name).expanduser()
    if path.is_file():
        return path
    if path.is_dir():
        raise UserError(f"-m {name} is a directory; a GGUF file in it would do")
    if path.exists():
        raise UserError(f"-m {name} is no regular file; a GGUF file is needed, to be mapped")
    if path.is_symlink():
        raise UserError(f"-m {name} is a link that leads nowhere")
    if name in WHEEL_MODELS:
        found = find_wheel_model(name, WHEEL_MODELS[name])
        if found is None:
            raise UserError(f"{name} is not there yet: phaseloop pull {name} fetches it")
        return found
    found = find_pulled_from_hub(name)
    if found is not None:
        return found
    near = difflib.get_close_matches(name, WHEEL_MODELS, n=1, cutoff=0.6)
    hint = f"is {near[0]} meant?  " if near else ""
    raise UserError(f"-m {name}: no such file, and no model of that name; {hint}{what_is_there()}")


def find_pulled_from_hub(name: str) -> Path | None:
    try:
        return find_local(HubName.parse(name), None)
    except UserError:
        return None


def what_is_there() -> str:
    names = [model.name for model in pulled()]
    if not names:
        return f"nothing is pulled yet: phaseloop pull {next(iter(WHEEL_MODELS))} fetches a model"
    more = len(names) - PULLED_SHOWN_MAX
    shown = ", ".join(names[:PULLED_SHOWN_MAX]) + (f" and {more} more" if more > 0 else "")
    return f"pulled are {shown}"
