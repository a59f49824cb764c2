"""The samplers that a command line names, by their names or by their letters."""

from phaseloop.engine.settings import SAMPLER_LETTERS, SAMPLERS, SamplerName

from .errors import UserError
from .flags import nearest

OTHER_NAMES: dict[str, SamplerName] = {  # that llama-server takes, too
    "top-k": "top_k",
    "top-p": "top_p",
    "nucleus": "top_p",
    "typical-p": "typ_p",
    "typical": "typ_p",
    "typ-p": "typ_p",
    "typ": "typ_p",
    "min-p": "min_p",
    "temp": "temperature",
    "top-n-sigma": "top_n_sigma",
}


def samplers_of(names: str | None, letters: str | None) -> tuple[SamplerName, ...]:
    """As --samplers or --sampler-seq has them; llama-server's order without either."""
    if names is not None and letters is not None:
        raise UserError("--samplers and --sampler-seq say the same; give one")
    if letters is not None:
        return tuple(letter(one) for one in letters)
    if names is not None:
        return tuple(sampler(one) for one in names.split(";") if one)
    return SAMPLERS


def letter(one: str) -> SamplerName:
    if one not in SAMPLER_LETTERS:
        raise UserError(f"--sampler-seq {one!r}: possible are {', '.join(SAMPLER_LETTERS)}")
    return SAMPLER_LETTERS[one]


def sampler(name: str) -> SamplerName:
    found = OTHER_NAMES.get(name, name)
    for known in SAMPLERS:
        if found == known:
            return known
    hint = nearest(name, SAMPLERS)
    raise UserError(f"--samplers {name!r}: possible are {', '.join(SAMPLERS)}{hint}")
