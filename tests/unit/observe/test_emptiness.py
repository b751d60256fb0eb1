"""The reasons that a user is given for a run without samples."""

from datetime import timedelta

import pytest

from torchinstruments.observe.emptiness import likely_reason
from torchinstruments.observe.sampling import (
    AlwaysSampler,
    EveryNForwardsSampler,
    EveryNStepsSampler,
    SamplingPolicy,
    TimedSampler,
)
from torchinstruments.observe.sampling import describe as described


def test_ranks_that_had_no_time_to_agree_say_so() -> None:
    """The interval was over, but not what it takes to agree; a longer run has another reason."""
    sampling = described(TimedSampler(timedelta(seconds=0.1)))
    short = likely_reason(sampling, forwards=9, elapsed_s=0.8, agreeing_s=1.2)
    assert "0.8 s" in short
    assert "up to 1.2 s" in short
    assert "none of the 9" in likely_reason(sampling, forwards=9, elapsed_s=1.3, agreeing_s=1.2)


@pytest.mark.parametrize(
    ("sampler", "forwards", "elapsed_s", "words"),
    [
        (AlwaysSampler(), 0, 9.0, ("never called", "model(...)")),
        (TimedSampler(timedelta(minutes=1)), 12, 9.04, ("9.0 s", "60 s", "immediate=True")),
        (TimedSampler(timedelta(seconds=2)), 1, 9.0, ("timed", "none of the 1 forwards")),
        (
            EveryNStepsSampler(5),
            12,
            9.0,
            ("EveryNStepsSampler(5)", "12 forwards", "fewer than 5", "smaller n"),
        ),
        (EveryNForwardsSampler(50), 12, 9.0, ("EveryNForwardsSampler(50)", "none of the 12", "smaller n")),
    ],
)
def test_the_reason_names_what_was_seen_and_the_way_out(
    sampler: SamplingPolicy, forwards: int, elapsed_s: float, words: tuple[str, ...]
) -> None:
    """Each case has its own sentence with the numbers of the run in it."""
    reason = likely_reason(described(sampler), forwards=forwards, elapsed_s=elapsed_s, traced=0)
    assert all(word in reason for word in words), reason


@pytest.mark.parametrize(
    ("forwards", "traced", "words"),
    [
        (0, 1, "forward was only traced, 1 time ("),
        (0, 3, "forward was only traced, 3 times ("),
        (2, 3, "chose none of the 2 forwards that were seen"),
    ],
)
def test_a_model_that_was_only_traced_is_not_said_to_be_never_called(
    forwards: int, traced: int, words: str
) -> None:
    """The sentence counts the traces, unless there were forwards too."""
    reason = likely_reason(described(AlwaysSampler()), forwards=forwards, elapsed_s=9.0, traced=traced)
    assert words in reason


@pytest.mark.parametrize(
    ("checkpointed", "words"),
    [(12, "all 12 forwards ran inside reentrant"), (11, "fewer than 5 attempts")],
)
def test_a_model_that_was_checkpointed_as_a_whole_is_not_said_to_have_stepped_too_seldom(
    checkpointed: int, words: str
) -> None:
    """No attempt was seen to begin there, however many steps there were."""
    described_as = described(EveryNStepsSampler(5))
    reason = likely_reason(described_as, forwards=12, elapsed_s=9.0, checkpointed=checkpointed)
    assert words in reason
    assert ("use_reentrant=False" in reason) is (checkpointed == 12)
