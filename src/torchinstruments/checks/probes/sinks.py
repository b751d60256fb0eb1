"""Attention sinks and outlier dimensions: two facts of trained transformers. Statistics, and no findings."""

import json
import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

import torch
from typing_extensions import override

from torchinstruments.checks.findings import plain
from torchinstruments.checks.probes.attention import (
    AttentionSums,
    attention_sums,
    audience_of,
    unlike_attention,
)
from torchinstruments.checks.probes.selectors import Selector, selectors_of
from torchinstruments.checks.probes.watching import Probe
from torchinstruments.checks.registration import positive_of, shown
from torchinstruments.errors import ConfigurationError
from torchinstruments.records import Scope
from torchinstruments.statistics.device import accumulation_dtype

__all__ = [
    "OUTLIER_FACTOR",
    "SINK_MASS",
    "UNIFORM_FACTOR",
    "OutlierDim",
    "SinkFacts",
    "SinkHead",
    "SinkProbe",
]

SINK_MASS = 0.3
"""Mean probability above which a key is a sink: the epsilon of Gu et al., arXiv:2410.10781."""

UNIFORM_FACTOR = 2.0
"""And so many times what even attention would give it, which is much where there are few positions; ours."""

OUTLIER_FACTOR = 6.0
"""Mean magnitude, in units of the median dimension's, from which a dimension is an outlier. The number is the
magnitude from which Dettmers et al., arXiv:2208.07339, count a feature as one; relative to the median, as in
Sun et al., arXiv:2402.17762, it does not depend on the scale of the stream."""

_TOLERANCE = 0.02
"""How far probabilities of a query may be from a sum of 1, as half precision leaves them."""

_BLOCK_ENTRIES = 1 << 20
"""Values of a stream that are looked at at a time."""

_MIN_FEATURES = 8
_MAX_FEATURES = 1_000_000
_MAX_KEYS = 1 << 22
"""Heads times keys of one site."""

_ATTENTION, _RESIDUAL = "attention", "residual"


@dataclass(frozen=True, slots=True)
class SinkHead:
    """A head most of whose queries attend to one position.

    Attributes:
        label: Of the site.
        head: Which head of it.
        position: Which key.
        mass: Mean probability that it gets from queries at other positions that can see it.
    """

    label: str
    head: int
    position: int
    mass: float


@dataclass(frozen=True, slots=True)
class OutlierDim:
    """A feature of the residual stream that is much larger than the others.

    Attributes:
        label: Of the site.
        dim: Which feature.
        factor: Its mean magnitude in units of the median feature's.
    """

    label: str
    dim: int
    factor: float


@dataclass(frozen=True, slots=True)
class SinkFacts:
    """What was seen at one site.

    Attributes:
        site: Its label.
        selector: What it was selected by, as written.
        scope: What the numbers cover.
        kind: ``attention`` or ``residual``.
        num_seen: Tensors that were looked at.
        num_rows: Queries, or positions of the stream, over all of them.
        num_heads: Heads; None at a residual site.
        num_sink_heads: Of these, those with a sink; None where it was not scored.
        sink_fraction: Share of heads with a sink.
        highest_mass: Highest mean probability that a key gets in any head.
        num_features: Features; None at an attention site.
        num_outlier_dims: Of these, the outliers; None where it was not scored.
        highest_factor: Largest mean magnitude in units of the median's.
        skipped: Why the site was not scored; ``""`` where it was.
    """

    site: str
    selector: str
    scope: Scope
    kind: str
    num_seen: int
    num_rows: int
    num_heads: int | None = None
    num_sink_heads: int | None = None
    sink_fraction: float | None = None
    highest_mass: float | None = None
    num_features: int | None = None
    num_outlier_dims: int | None = None
    highest_factor: float | None = None
    skipped: str = ""

    def to_dict(self) -> dict[str, object]:
        """Returns it as plain values that strict JSON can hold."""
        return {one.name: plain(getattr(self, one.name)) for one in fields(self)}


class _SinkSite:
    """One site of a sink probe."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.num_seen = 0
        self.num_rows = 0
        self.skipped = ""
        self.attention: AttentionSums | None = None
        self.magnitudes: torch.Tensor | None = None
        self._shape: tuple[int, ...] | None = None

    def take(self, tensor: torch.Tensor, forward: int) -> None:  # noqa: ARG002 - a seam
        """Adds a value up (training thread, hot path)."""
        self.num_seen += 1
        if self.skipped:
            return
        if self.kind == _ATTENTION:
            self.skipped = unlike_attention(tensor) or self._take_attention(tensor)
        else:
            self.skipped = self._take_residual(tensor)

    def _take_attention(self, tensor: torch.Tensor) -> str:
        """Adds probabilities up, or returns why it does not."""
        shape = (*tensor.shape[1:],)
        if shape[0] * shape[2] > _MAX_KEYS:
            return f"too_many_keys: {shape[0]} heads times {shape[2]} keys, at most {_MAX_KEYS}"
        if self._shape not in {None, shape}:
            return f"shape_changed: {self._shape} heads, queries and keys, then {shape}; watch one length"
        self._shape = shape
        found = attention_sums(tensor)
        self.num_rows += tensor.shape[0] * shape[1]
        self.attention = found if self.attention is None else self.attention.plus(found)
        return ""

    def _take_residual(self, tensor: torch.Tensor) -> str:
        """Adds magnitudes up, or returns why it does not."""
        num_features = tensor.shape[-1] if tensor.ndim else 1
        if not tensor.is_floating_point():
            return f"not_a_stream: values of {str(tensor.dtype).removeprefix('torch.')}"
        if not _MIN_FEATURES <= num_features <= _MAX_FEATURES:
            return f"unlike_a_stream: {num_features} features, from {_MIN_FEATURES} to {_MAX_FEATURES}"
        if self.magnitudes is not None and self.magnitudes.numel() != num_features:
            return f"shape_changed: {self.magnitudes.numel()} features, then {num_features}"
        wide = accumulation_dtype(tensor.device)
        total = torch.zeros(num_features, dtype=wide, device=tensor.device)
        # Parts of a tensor that does not lie densely are copied one by one.
        for part in (tensor,) if tensor.is_contiguous() or tensor.ndim < 2 else tensor.split(1):
            for piece in part.reshape(-1, num_features).split(max(1, _BLOCK_ENTRIES // num_features)):
                magnitudes = (piece if piece.itemsize > 1 else piece.float()).abs()
                total = total + magnitudes.sum(0, dtype=wide)
        self.num_rows += tensor.numel() // num_features
        self.magnitudes = total if self.magnitudes is None else self.magnitudes + total
        return ""


class SinkProbe(Probe[_SinkSite]):
    """Looks for attention sinks and outlier dimensions.

    ::

        probe = SinkProbe(attention=[func("softmax")], residual=[module("transformer.h.*")])
        with probe.watch(model):
            model(tokens)
        probe.sink_heads, probe.outlier_dims, probe.facts()

    Args:
        attention: Selectors of attention probabilities, of shape (batch, heads, queries, keys).
        residual: Selectors of the residual stream, features last.
        sink_mass: Mean probability, below 1, above which a key is a sink.
        uniform_factor: And so many times what even attention would give it.
        outlier_factor: Mean magnitude from which a dimension is an outlier, in units of the median's.

    Raises:
        ConfigurationError: An argument is not possible.
    """

    name = "sink_probe"

    def __init__(
        self,
        *,
        attention: Iterable[Selector] = (),
        residual: Iterable[Selector] = (),
        sink_mass: float = SINK_MASS,
        uniform_factor: float = UNIFORM_FACTOR,
        outlier_factor: float = OUTLIER_FACTOR,
    ) -> None:
        kinds = _kinds(attention, residual)
        self._kinds = kinds
        self._sink_mass = positive_of("sink_mass", sink_mass)
        if self._sink_mass >= 1:
            raise ConfigurationError(
                f"sink_mass={shown(sink_mass)} is not possible; give a mean probability between 0 and 1, "
                f"such as {SINK_MASS}"
            )
        self._uniform_factor = positive_of("uniform_factor", uniform_factor)
        self._outlier_factor = positive_of("outlier_factor", outlier_factor)
        super().__init__(tuple(kinds))

    @override
    def new_site(self, selector: Selector, label: str) -> _SinkSite:
        """Returns what is kept of a site (training thread, hot path)."""
        return _SinkSite(self._kinds[selector])

    @property
    def sink_heads(self) -> tuple[SinkHead, ...]:
        """Heads with a sink, each with its strongest one; reads the devices."""
        return tuple([head for _, heads, _ in self._scored() for head in heads])

    @property
    def outlier_dims(self) -> tuple[OutlierDim, ...]:
        """Outlier dimensions, largest first at each site; reads the devices."""
        return tuple([dim for _, _, dims in self._scored() for dim in dims])

    def facts(self) -> tuple[SinkFacts, ...]:
        """Returns what was seen at each site, in the order of their first values; reads the devices."""
        return tuple([facts for facts, _, _ in self._scored()])

    def to_dict(self) -> dict[str, Any]:
        """Returns everything as plain values that strict JSON can hold."""
        scored = self._scored()
        return {
            "probe": self.name,
            "num_forwards": self.num_forwards,
            "sink_mass": self._sink_mass,
            "uniform_factor": self._uniform_factor,
            "outlier_factor": self._outlier_factor,
            "sites": [facts.to_dict() for facts, _, _ in scored],
            "sink_heads": [_shown(head) for _, heads, _ in scored for head in heads],
            "outlier_dims": [_shown(dim) for _, _, dims in scored for dim in dims],
            "unmatched": list(self.unmatched),
            "unavailable": [entry.to_dict() for entry in self.unavailable],
        }

    def to_json(self, *, indent: int | None = 1) -> str:
        """Returns `to_dict` as strict JSON.

        Args:
            indent: Spaces a level; None for one line.
        """
        return json.dumps(self.to_dict(), indent=indent, sort_keys=True, allow_nan=False)

    def __str__(self) -> str:
        """Returns a summary for people."""
        lines = [f"SinkProbe: {self.num_forwards} watched forwards"]
        for facts, heads, dims in self._scored()[:50]:
            if facts.skipped:
                lines.append(f"  {facts.site}: skipped, {facts.skipped}")
            elif facts.kind == _ATTENTION:
                at = f", head {heads[0].head} at position {heads[0].position}" if heads else ""
                lines.append(
                    f"  {facts.site}: {facts.num_sink_heads} of {facts.num_heads} heads have a sink{at}"
                )
            else:
                at = f", dimension {dims[0].dim} {dims[0].factor:.1f} times the median" if dims else ""
                lines.append(f"  {facts.site}: {facts.num_outlier_dims} of {facts.num_features} outliers{at}")
        lines += [f"  {entry.reason}: {', '.join(entry.names[:3])}" for entry in self.unavailable[:10]]
        return "\n".join(lines)

    def _scored(self) -> list[tuple[SinkFacts, list[SinkHead], list[OutlierDim]]]:
        """Returns facts, sinks and outliers of each site."""
        return [
            self._of_attention(selector, label, site)
            if site.kind == _ATTENTION
            else self._of_residual(selector, label, site)
            for (selector, label), site in self._sites.items()
            if site.num_seen
        ]

    def _of_attention(
        self, selector: Selector, label: str, site: _SinkSite
    ) -> tuple[SinkFacts, list[SinkHead], list[OutlierDim]]:
        """Scores the heads of a site."""
        sums, scope = site.attention, self.scope_of(selector, label)
        skipped = site.skipped or _unlike_probabilities(sums)
        if skipped or sums is None:
            return (
                SinkFacts(
                    label, str(selector), scope, _ATTENTION, site.num_seen, site.num_rows, skipped=skipped
                ),
                [],
                [],
            )
        num_heads, num_keys = sums.mass.shape
        is_causal = sums.later.item() == 0
        audience = audience_of(sums.live.tolist(), num_keys, is_causal=is_causal)
        seen_by = audience.seen_by
        enough = [
            place
            for place in range(num_keys)
            if seen_by[place] and 2 * seen_by[place] >= audience.num_queries
        ]
        heads: list[SinkHead] = []
        highest = 0.0
        for head, row in enumerate(sums.mass.tolist()):
            masses = {place: row[place] / seen_by[place] for place in enough}
            strongest = max(masses, key=masses.__getitem__, default=None)
            if strongest is None:
                continue
            highest = max(highest, masses[strongest])
            even = audience.even_mass[strongest] / seen_by[strongest]
            if masses[strongest] > max(self._sink_mass, self._uniform_factor * even):
                heads.append(SinkHead(label, head, strongest, masses[strongest]))
        facts = SinkFacts(
            label,
            str(selector),
            scope,
            _ATTENTION,
            site.num_seen,
            site.num_rows,
            num_heads=num_heads,
            num_sink_heads=len(heads),
            sink_fraction=len(heads) / num_heads,
            highest_mass=highest,
        )
        return facts, heads, []

    def _of_residual(
        self, selector: Selector, label: str, site: _SinkSite
    ) -> tuple[SinkFacts, list[SinkHead], list[OutlierDim]]:
        """Scores the features of a site."""
        scope = self.scope_of(selector, label)
        totals: list[float] = [] if site.magnitudes is None else site.magnitudes.tolist()
        typical = statistics.median(totals) if totals else 0.0
        skipped = site.skipped
        if not skipped and not all(map(math.isfinite, totals)):
            num_nonfinite = sum(not math.isfinite(total) for total in totals)
            skipped = f"nonfinite: {num_nonfinite} features have NaN or infinity"
        if not skipped and typical == 0:
            skipped = "median_is_zero: more than half of the features are zero throughout"
        if skipped:
            return (
                SinkFacts(
                    label, str(selector), scope, _RESIDUAL, site.num_seen, site.num_rows, skipped=skipped
                ),
                [],
                [],
            )
        factors = [total / typical for total in totals]
        found = [
            OutlierDim(label, dim, factor)
            for dim, factor in sorted(enumerate(factors), key=lambda one: -one[1])
            if factor >= self._outlier_factor
        ]
        facts = SinkFacts(
            label,
            str(selector),
            scope,
            _RESIDUAL,
            site.num_seen,
            site.num_rows,
            num_features=len(factors),
            num_outlier_dims=len(found),
            highest_factor=max(factors),
        )
        return facts, [], found


def _unlike_probabilities(sums: AttentionSums | None) -> str:
    """Returns why sums are not those of probabilities, or ``""``."""
    if sums is None:
        return ""
    num_nonfinite = int(sums.num_nonfinite.item())
    if num_nonfinite:
        return f"nonfinite: {num_nonfinite} values are NaN or infinite"
    lowest = float(sums.lowest.item())
    if lowest < 0:
        return f"not_attention: values below 0 (lowest {lowest:.3g})"
    if not sums.live.any().item():
        return "not_attention: every value is 0"
    furthest = float(sums.furthest_from_one.item())
    if furthest > _TOLERANCE:
        return f"not_attention: values of a query do not sum to 1 (furthest by {furthest:.3g})"
    return ""


def _kinds(attention: object, residual: object) -> dict[Selector, str]:
    """Returns what each selector stands for.

    Raises:
        ConfigurationError: There is none, or one stands for both.
    """
    kinds: dict[Selector, str] = {}
    for kind, given in ((_ATTENTION, attention), (_RESIDUAL, residual)):
        if given == () or given == []:
            continue
        for selector in selectors_of(kind, given):
            if selector in kinds:
                raise ConfigurationError(
                    f"{selector} stands in attention and in residual; give it once, or use two probes"
                )
            kinds[selector] = kind
    if not kinds:
        raise ConfigurationError(
            "attention and residual are both empty; give selectors such as attention=[func('softmax')]"
        )
    return kinds


def _shown(one: SinkHead | OutlierDim) -> dict[str, object]:
    return {field.name: plain(getattr(one, field.name)) for field in fields(one)}
