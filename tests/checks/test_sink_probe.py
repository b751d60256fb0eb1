"""Attention sinks and outlier dimensions, by their definitions."""

import json

import pytest
import torch
from torch import nn

from torchinstruments.checks import SinkProbe, func, module
from torchinstruments.checks.probes.attention import attention_sums, audience_of
from torchinstruments.errors import ConfigurationError

T = 12


def causal(batch=2, heads=3, queries=T, keys=T):
    """Returns even causal attention."""
    seen = torch.ones(queries, keys).tril(keys - queries)
    return (seen / seen.sum(-1, keepdim=True)).expand(batch, heads, queries, keys).clone()


def with_sink(attention, head, position, mass):
    """Returns attention in which one head gives a share of all to one position that is seen."""
    seen = attention[:, head, :, position] > 0
    share = torch.zeros_like(attention[:, head])
    share[..., position] = 1.0
    changed = (1 - mass) * attention[:, head] + mass * share
    attention[:, head] = torch.where(seen.unsqueeze(-1), changed, attention[:, head])
    return attention


def of(tensor, **options):
    """Returns a probe that saw a tensor as attention."""
    probe = SinkProbe(attention=[module("")], **options)
    model = nn.Identity()
    with probe.watch(model) as watching:
        model(tensor)
    assert watching is probe
    return probe


def naive(tensor):
    """Returns the masses of causal attention by the definition, key by key."""
    heads, keys = tensor.shape[1], tensor.shape[3]
    return [
        [
            float(tensor[:, head, key + 1 :, key].double().mean()) if key + 1 < keys else 0.0
            for key in range(keys)
        ]
        for head in range(heads)
    ]


def test_even_attention_has_no_sink():
    """Causal or not, though the first positions of causal attention get much of it."""
    for tensor in (causal(), torch.full((1, 2, T, T), 1 / T), causal(queries=4, keys=4)):
        probe = of(tensor)
        assert probe.sink_heads == ()
        assert probe.facts()[0].skipped == ""


@pytest.mark.parametrize("position", [0, 4])
def test_a_sink_is_a_head_and_a_position(position):
    """With the mean that it gets from the queries behind it."""
    tensor = with_sink(causal(), head=1, position=position, mass=0.8)
    (head,) = of(tensor).sink_heads
    assert (head.label, head.head, head.position) == ("(model)", 1, position)
    assert head.mass == pytest.approx(naive(tensor)[1][position])
    (facts,) = of(tensor).facts()
    assert (facts.num_heads, facts.num_sink_heads, facts.sink_fraction) == (3, 1, pytest.approx(1 / 3))


def test_the_threshold_is_the_one_given():
    """A mean above it, and above a multiple of even attention."""
    tensor = with_sink(causal(), head=0, position=0, mass=0.4)
    mass = naive(tensor)[0][0]
    assert 0.3 < mass < 0.6
    assert len(of(tensor, uniform_factor=0.01).sink_heads) == 1
    assert of(tensor, uniform_factor=0.01, sink_mass=0.6).sink_heads == ()
    assert of(tensor, uniform_factor=3.0).sink_heads == ()


def test_a_position_that_few_queries_see_is_none():
    """The last but one key gets all of the only query that sees it."""
    tensor = with_sink(causal(), head=0, position=T - 2, mass=1.0)
    assert of(tensor).sink_heads == ()


def test_attention_to_oneself_is_none():
    """Of a head that looks at nothing else."""
    tensor = torch.eye(T).expand(1, 1, T, T)
    probe = of(tensor)
    assert (probe.sink_heads, probe.facts()[0].highest_mass) == ((), 0.0)


def test_all_of_it_on_one_position_is_a_sink_in_half_precision_too():
    """Where everything else is rounded to zero."""
    tensor = torch.zeros(1, 1, T, T, dtype=torch.float16)
    tensor[..., 0] = 1
    (head,) = of(tensor).sink_heads
    assert (head.position, head.mass) == (0, 1.0)


def test_queries_that_give_nothing_do_not_count():
    """Of padding, which a mask leaves without any key."""
    tensor = with_sink(causal(batch=2, heads=1), head=0, position=0, mass=0.8)
    expected = of(tensor).sink_heads[0].mass
    tensor = torch.cat((tensor, torch.zeros(1, 1, T, T)))
    assert of(tensor).sink_heads[0].mass == pytest.approx(expected)


def test_the_sums_are_those_of_the_definition():
    """On random causal attention, and with fewer queries than keys."""
    torch.manual_seed(0)
    tensor = torch.randn(2, 3, T, T).masked_fill(torch.ones(T, T).triu(1).bool(), -torch.inf).softmax(-1)
    sums = attention_sums(tensor)
    audience = audience_of(sums.live.tolist(), T, is_causal=True)
    masses = [
        [m / n if n else 0.0 for m, n in zip(row, audience.seen_by, strict=True)]
        for row in sums.mass.tolist()
    ]
    for mine, theirs in zip(masses, naive(tensor), strict=True):
        assert mine == pytest.approx(theirs)
    sums = attention_sums(causal(1, 1, 4, T))
    audience = audience_of(sums.live.tolist(), T, is_causal=True)
    assert audience.seen_by == (4,) * 8 + (3, 2, 1, 0)
    assert sum(audience.even_mass) == pytest.approx(float(sums.mass.sum()))
    assert audience.even_mass == pytest.approx(sums.mass[0].tolist())
    full = attention_sums(torch.full((1, 1, T, T), 1 / T))
    audience = audience_of(full.live.tolist(), T, is_causal=False)
    assert audience.even_mass == pytest.approx(full.mass[0].tolist())


def test_blocks_of_queries_add_up(monkeypatch):
    """The scratch is bounded."""
    tensor = with_sink(causal(), head=2, position=0, mass=0.7)
    whole = attention_sums(tensor)
    monkeypatch.setattr("torchinstruments.checks.probes.attention._SCRATCH_ENTRIES", 100)
    pieces = attention_sums(tensor)
    torch.testing.assert_close(whole.mass, pieces.mass)
    torch.testing.assert_close(whole.live, pieces.live)


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        (torch.ones(2, T, T) / T, "not_attention: 3 dimensions"),
        (torch.ones(1, 1, 2, T) / T, "too_few_positions: 2x12"),
        (torch.ones(1, 1, T, T), "not_attention: values of a query do not sum to 1"),
        (torch.ones(1, 1, T, T, dtype=torch.int64), "not_attention: values of int64"),
        (torch.full((1, 1, T, T), -1 / T), "not_attention: values below 0 (lowest -0.0833)"),
        (torch.eye(T)[None, None] * 2 - 1 / T, "not_attention: values below 0"),
        (torch.zeros(1, 1, T, T), "not_attention: every value is 0"),
        (torch.full((1, 1, T, T), float("nan")), "nonfinite: 144"),
    ],
)
def test_what_is_no_attention_is_skipped(tensor, reason):
    """With the reason, and without a verdict."""
    probe = of(tensor)
    (facts,) = probe.facts()
    assert facts.skipped.startswith(reason)
    assert facts.num_sink_heads is None
    assert probe.sink_heads == ()
    json.loads(probe.to_json())


def test_lengths_that_change_are_said():
    """Positions of two lengths do not add up."""
    probe, model = SinkProbe(attention=[module("")]), nn.Identity()
    with probe.watch(model):
        model(causal())
        model(causal(queries=5, keys=5))
    assert probe.facts()[0].skipped.startswith("shape_changed")


def test_outlier_dimensions_are_many_times_the_median():
    """Of the mean magnitude over all positions; the largest comes first."""
    torch.manual_seed(0)
    stream = torch.randn(2, 5, 16)
    stream[..., 3] *= 50
    stream[..., 7] *= 20
    probe, model = SinkProbe(residual=[module("")]), nn.Identity()
    with probe.watch(model):
        model(stream)
        model(stream.half())
    assert [(one.label, one.dim) for one in probe.outlier_dims] == [("(model)", 3), ("(model)", 7)]
    means = torch.cat((stream, stream.half().float())).double().abs().mean((0, 1))
    # The median of an even number of features is the mean of the two in the middle.
    middle = means.sort().values[7:9].mean()
    assert probe.outlier_dims[0].factor == pytest.approx(float(means[3] / middle), rel=1e-6)
    (facts,) = probe.facts()
    assert (facts.num_features, facts.num_outlier_dims, facts.num_rows) == (16, 2, 20)
    assert "2 of 16 outliers, dimension 3" in str(probe)


@pytest.mark.parametrize(
    ("stream", "reason"),
    [
        (torch.ones(2, 4), "unlike_a_stream: 4 features"),
        (torch.ones(2, 16, dtype=torch.int64), "not_a_stream"),
        (torch.zeros(2, 16), "median_is_zero"),
        (torch.full((2, 16), float("inf")), "nonfinite: 16"),
    ],
)
def test_what_is_no_stream_is_skipped(stream, reason):
    """With the reason."""
    probe, model = SinkProbe(residual=[module("")]), nn.Identity()
    with probe.watch(model):
        model(stream)
    assert probe.facts()[0].skipped.startswith(reason)
    assert probe.outlier_dims == ()


def test_softmax_in_a_layer_is_an_attention_site():
    """As eager attention calls it; the label has the module."""

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.query, self.key = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            scores = (self.query(x) @ self.key(x).transpose(-1, -2)).unsqueeze(1)
            future = torch.ones(x.shape[1], x.shape[1]).triu(1).bool()
            return x + (scores.masked_fill(future, -torch.inf).softmax(-1) @ x.unsqueeze(1)).squeeze(1)

    torch.manual_seed(0)
    model = nn.Sequential(Layer())
    probe = SinkProbe(attention=[func("softmax")], residual=[module("0")])
    with probe.watch(model):
        model(torch.randn(2, 6, 8))
    attention, residual = probe.facts()
    assert (attention.site, attention.kind, attention.num_heads, attention.skipped) == (
        "0:softmax",
        "attention",
        1,
        "",
    )
    assert (residual.site, residual.kind, residual.num_features) == ("0", "residual", 8)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "both empty"),
        ({"attention": ["softmax"]}, "give selectors"),
        ({"attention": [func("a")], "residual": [func("a")]}, "in attention and in residual"),
        ({"attention": [func("a")], "sink_mass": 0}, "give a positive number"),
        ({"attention": [func("a")], "sink_mass": 3}, "sink_mass=3 is not possible; give a mean probability"),
        ({"attention": [func("a")], "sink_mass": 1.0}, "between 0 and 1"),
    ],
)
def test_mistakes_are_one_sentence(options, message):
    """With the value and the way out."""
    with pytest.raises(ConfigurationError, match=message):
        SinkProbe(**options)
