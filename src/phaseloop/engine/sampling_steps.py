"""The samplers of the chain, one function each: what every step does to the candidates.

They do what llama.cpp's samplers of the same names do (build 11434, src/llama-sampler.cpp), in
float64 instead of float32, with ties settled by the lowest id where there it is left to the sort.
DRY has its own file, sampling_dry.py.
"""

from collections.abc import Callable, Sequence

import numpy as np

from .sampling_candidates import CEILING, Candidates, leading_until
from .settings import Sampling


def bias(candidates: Candidates, sampling: Sampling) -> None:
    """Add to the logits of some tokens; minus infinity rules a token out.

    Each entry counts, also where a token has several.  Comes before all samplers, whatever their
    order.
    """
    added = np.zeros(candidates.vocabulary)
    for token, value in sampling.logit_bias:
        if 0 <= token < candidates.vocabulary:
            added[token] += value if value == -np.inf else min(max(value, -CEILING), CEILING)
    added = candidates.look_up(added)
    touched = np.flatnonzero(added)
    ruled_out = np.isneginf(added)
    candidates.change(touched, candidates.logits[touched] + added[touched])
    if ruled_out.any():
        candidates.keep(np.flatnonzero(~ruled_out), counted=candidates.counted)


def penalties(candidates: Candidates, sampling: Sampling, tokens: Sequence[int]) -> None:
    """Lower the logits of tokens that occur among the last `repeat_last_n`, prompt included.

    repeat_penalty divides a positive logit and multiplies any other, once however often the token
    occurs; then frequency_penalty is subtracted per occurrence, and presence_penalty once.
    """
    if not penalties_apply(sampling):
        return
    window = known(last(tokens, sampling.repeat_last_n), candidates.vocabulary)
    counts = candidates.look_up(np.bincount(window, minlength=candidates.vocabulary))
    seen = np.flatnonzero(counts)
    logits = candidates.logits[seen].astype(np.float64)
    repeat = sampling.repeat_penalty
    logits = np.where(logits <= 0, logits * repeat, logits / repeat)
    subtracted = counts[seen] * sampling.frequency_penalty + sampling.presence_penalty
    candidates.change(seen, np.clip(logits, -CEILING, CEILING) - subtracted)


def penalties_apply(sampling: Sampling) -> bool:
    return sampling.repeat_last_n != 0 and (
        sampling.repeat_penalty != 1.0
        or sampling.frequency_penalty != 0.0
        or sampling.presence_penalty != 0.0
    )


def top_n_sigma(candidates: Candidates, sampling: Sampling) -> None:
    """Rule out logits more than n standard deviations below the highest."""
    if sampling.top_n_sigma <= 0.0 or len(candidates) < 2:
        return
    logits = candidates.logits.astype(np.float64)
    off = logits - logits.sum() / len(logits)
    sigma = float(np.sqrt((off * off).sum() / len(logits)))
    candidates.drop_below(candidates.top - sampling.top_n_sigma * sigma)


def top_k(candidates: Candidates, sampling: Sampling) -> None:
    """Keep the k likeliest."""
    if sampling.top_k > 0:
        candidates.keep_best(sampling.top_k)


def typical(candidates: Candidates, sampling: Sampling) -> None:
    """Keep those whose surprise is nearest to the expected one, up to more than a probability.

    Surprise is the negative log probability, and its expectation the entropy.  Tokens that were
    ruled out have no part in it; in llama.cpp they make the entropy NaN, and the order arbitrary.
    """
    if sampling.typical_p >= 1.0:
        return
    logs, probabilities = candidates.log_probabilities()
    entropy = -float((probabilities * logs).sum())
    nearness = -np.abs(logs + entropy)
    more = float(np.nextafter(sampling.typical_p, np.inf))
    order = leading_until(nearness, probabilities, more, at_least=sampling.min_keep)
    candidates.keep(np.sort(order), counted=max(len(order), sampling.min_keep))


def top_p(candidates: Candidates, sampling: Sampling) -> None:
    """Keep the fewest of the likeliest whose probabilities add up to p or more."""
    if sampling.top_p < 1.0:
        order = candidates.likeliest(sampling.top_p, at_least=sampling.min_keep)
        candidates.keep(order, counted=max(len(order), sampling.min_keep), ranked=True)


def min_p(candidates: Candidates, sampling: Sampling) -> None:
    """Keep those with at least p times the probability of the likeliest, which always stays."""
    if sampling.min_p <= 0.0:
        return
    enough = candidates.logits >= candidates.top + float(np.log(sampling.min_p))
    found, wanted = int(enough.sum()), max(1, sampling.min_keep)
    if found >= wanted:
        candidates.keep(np.flatnonzero(enough), counted=found)
    else:
        candidates.keep_best(wanted)


def xtc(candidates: Candidates, sampling: Sampling, coin: Callable[[], float]) -> None:
    """By chance, exclude the top choices: of those that reach the threshold, keep the unlikeliest.

    `coin` is a number in [0, 1); above `xtc_probability` all stays as it is.  It stays too where
    fewer than `min_keep` would be left.
    """
    if not xtc_applies(sampling) or len(candidates) < 2 or coin() > sampling.xtc_probability:
        return
    weights, total = candidates.weights()
    reaching = np.flatnonzero(weights >= sampling.xtc_threshold * total)
    left = candidates.counted - (len(reaching) - 1)
    if len(reaching) < 2 or left < sampling.min_keep:
        return
    kept = np.ones(len(candidates), dtype=bool)
    kept[reaching] = False
    lowest = candidates.logits[reaching]
    kept[reaching[np.flatnonzero(lowest == lowest.min())[-1]]] = True
    candidates.keep(np.flatnonzero(kept), counted=left)


def xtc_applies(sampling: Sampling) -> bool:
    return sampling.xtc_probability > 0.0 and sampling.xtc_threshold <= 0.5


def temperature(candidates: Candidates, sampling: Sampling) -> None:
    """Divide the logits; at 0 or below, keep the likeliest alone.

    So too where the temperature is too small to divide by.
    """
    value = sampling.temperature
    if sampling.dynatemp_range > 0.0:
        if candidates.counted < 2:
            return
        value = dynamic_temperature(candidates, sampling)
    if value == 1.0:
        return
    if not value > 0.0 or abs(candidates.top / value) > CEILING:
        candidates.keep(candidates.best(1), counted=candidates.counted, ranked=True)
    else:
        scaled = candidates.logits.astype(np.float64) / value
        candidates.logits = np.maximum(scaled, -CEILING)


def dynamic_temperature(candidates: Candidates, sampling: Sampling) -> float:
    """A temperature in the range around `temperature`: the surer the model, the lower.

    How sure it is says the entropy, as a part of what it could be at most among the candidates.
    """
    low = max(0.0, sampling.temperature - sampling.dynatemp_range)
    high = sampling.temperature + sampling.dynatemp_range
    logs, probabilities = candidates.log_probabilities()
    entropy = abs(float((probabilities * logs).sum()))
    part = entropy / float(np.log(candidates.counted))
    return low + (high - low) * float(np.power(part, sampling.dynatemp_exponent))


def last(tokens: Sequence[int], count: int) -> Sequence[int]:
    """The last tokens; all where the count is negative, none where it is 0."""
    if count == 0:
        return ()
    return tokens if count < 0 else tokens[-count:]


def known(tokens: Sequence[int], vocabulary: int) -> np.ndarray[tuple[int], np.dtype[np.intp]]:
    """Without what is no token: a place holder for an image, say."""
    array = np.fromiter(tokens, np.intp, len(tokens))
    return array[(array >= 0) & (array < vocabulary)]
