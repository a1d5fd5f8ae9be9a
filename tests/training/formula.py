"""The objective written down again from its formula with plain numbers: what the code is held against."""

import math

import torch


def written_down(terms, settings):
    """J, token by token. Everything without a gradient is a float; what has one stays a tensor of one number."""
    total = torch.zeros((), dtype=torch.float64)
    mean = lambda values: sum(values) / len(values)  # noqa: E731
    for t in range(len(terms.weights)):
        mine = [s for s in range(len(terms.weights)) if terms.answers[s] == terms.answers[t]]
        old = terms.engine_logprobs if settings.old == "engine" else terms.old_logprobs
        a, logprob = float(terms.advantages[t]), terms.logprobs[t]
        log_ratio = mean([terms.logprobs[s] - old[s] for s in mine]) if settings.loss == "gspo" else logprob - old[t]
        ratio = torch.exp(log_ratio)
        clipped = torch.clamp(ratio, 1 - settings.clip_low, 1 + settings.clip_high)
        if settings.loss in ("ppo", "gspo"):
            l_t = min(ratio * a, clipped * a, key=lambda value: value.item())
            if settings.dual_clip and a < 0 and l_t.item() < settings.dual_clip * a:
                l_t = torch.tensor(settings.dual_clip * a, dtype=torch.float64)
        else:
            l_t = (clipped.item() if settings.loss == "cispo" else 1.0) * a * logprob
        counted = {"token": [t], "sequence": mine, "none": []}[settings.importance.level]
        rho = math.exp(sum(float(old[s] - terms.engine_logprobs[s]) for s in counted))
        if rho > settings.importance.cap:
            rho = settings.importance.cap if settings.importance.bound == "truncate" else 0.0
        term = rho * l_t + settings.entropy * terms.entropies[t]
        if settings.kl.coefficient and settings.kl.place == "loss":
            d = logprob - terms.reference_logprobs[t]
            k = {"k1": d, "k2": d * d / 2, "k3": torch.exp(-d) - 1 + d}[settings.kl.estimator]
            term = term - settings.kl.coefficient * k
        total = total + float(terms.weights[t]) * term
    return total
