"""Why a run that closes has no sample: the likely reason, for the one warning that says so."""

from collections.abc import Mapping

__all__ = ["likely_reason"]


def likely_reason(
    sampling: Mapping[str, object],
    *,
    forwards: int,
    elapsed_s: float,
    traced: int = 0,
    checkpointed: int = 0,
    agreeing_s: float = 0.0,
) -> str:
    """Returns the likely reason and the way out, as the second half of a sentence (at close).

    Args:
        sampling: What ``run.json`` says of the sampler, as `sampling.describe` returns it.
        forwards: Root forwards that were seen.
        elapsed_s: Seconds from attach to close.
        traced: Forwards that made a program, by ``torch.export`` for one, which are no root forwards.
        checkpointed: Root forwards inside reentrant activation checkpointing.
        agreeing_s: What ranks need at least to agree on the first forward; 0 where they do not agree.
    """
    if forwards == 0 and traced:
        return (
            f"the attached module's forward was only traced, {traced} {'time' if traced == 1 else 'times'} "
            f"(the errors in the manifest say by what), and nothing of that is measured; call the attached "
            f"module itself, as model(...), for a program made of it has no hooks"
        )
    if forwards == 0:
        return (
            "the attached module's forward was never called; attach to the module that the training loop "
            "calls, and call it as model(...), not model.forward(...)"
        )
    settings = sampling.get("settings")
    interval_s = settings.get("interval_s") if isinstance(settings, Mapping) else None
    if isinstance(interval_s, (int, float)) and elapsed_s < interval_s:
        return (
            f"it ended after {elapsed_s:.1f} s, before the first interval of {interval_s:g} s was over; "
            f"give a shorter interval, or sampler=TimedSampler(interval, immediate=True)"
        )
    if isinstance(interval_s, (int, float)) and elapsed_s < agreeing_s:
        return (
            f"it ended after {elapsed_s:.1f} s, and to agree on the first forward the ranks need up to "
            f"{agreeing_s:.1f} s, whatever the interval; give "
            f"sampler=TimedSampler(interval, immediate=True), or EveryNStepsSampler(n)"
        )
    n = settings.get("n") if isinstance(settings, Mapping) else None
    if sampling.get("type") == "every_n_steps" and checkpointed == forwards:
        return (
            f"all {forwards} forwards ran inside reentrant activation checkpointing, where gradients are "
            f"off, so that no attempt at an optimizer step was seen to begin; give use_reentrant=False"
        )
    if sampling.get("type") == "every_n_steps":
        return (
            f"EveryNStepsSampler({n}) chose none of {forwards} forwards: fewer than {n} attempts at an "
            f"optimizer step were seen, and only optimizers that hold the model's parameters count; take a "
            f"smaller n, or EveryNForwardsSampler(n) where no optimizer steps"
        )
    if sampling.get("type") == "every_n_forwards":
        return f"EveryNForwardsSampler({n}) chose none of the {forwards} forwards seen; take a smaller n"
    return f"the sampler ({sampling.get('type')}) chose none of the {forwards} forwards that were seen"
