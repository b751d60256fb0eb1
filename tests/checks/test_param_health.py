"""Audits of parameters, buffers and mappings, of every kind of tensor."""

import json
import math
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from checks.training import INF, Secretive, mlp
from torchinstruments.checks import Severity, param_health
from torchinstruments.errors import ConfigurationError

NAN = float("nan")
FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
FLOATS_8 = [
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
]
INTEGERS = [
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
]


def audited(target: Any, **options: Any) -> Any:
    """Returns the audit of a target."""
    return param_health(target, **options)


def scanned(tensor: torch.Tensor, **options: Any) -> Any:
    """Returns what was counted in one tensor."""
    return audited({"x": tensor}, **options).row("x").scanned


def codes(health):
    """Returns the codes of the findings."""
    return [finding.code for finding in health.findings]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_fresh_model_with_norm_layers_has_information_alone(dtype):
    """The weights of norm layers are all one, their biases and running means all zero: no fault."""
    model = nn.Sequential(
        nn.Embedding(7, 8, padding_idx=0),
        nn.Conv1d(8, 8, 3),
        nn.BatchNorm1d(8),
        nn.GroupNorm(2, 8),
        nn.LayerNorm(8),
        nn.RMSNorm(8),
        nn.InstanceNorm1d(8, affine=True, track_running_stats=True),
        nn.TransformerEncoderLayer(8, 2, 16),
        nn.MultiheadAttention(8, 2, add_bias_kv=True),
        nn.LSTM(8, 8),
        nn.GRU(8, 8, num_layers=2, bidirectional=True),
        nn.PReLU(8),
        nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)),
    )
    health = audited(model.to(dtype))
    assert {finding.severity for finding in health.findings} == {Severity.INFO}
    assert codes(health) == ["param_all_zero", "param_all_same"]
    assert "2.weight" in health.findings[1].names
    assert audited(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))).findings == ()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_nonfinite_values_are_counted_by_sign(dtype):
    """NaN, infinity and negative infinity each by themselves; the extremes are those of the finite ones."""
    found = scanned(torch.tensor([NAN, INF, INF, -INF, -INF, -INF, 1.0, -2.0, 0.0, -0.0], dtype=dtype))
    assert (found.num_nan, found.num_posinf, found.num_neginf, found.num_zero) == (1, 2, 3, 2)
    assert (found.minimum, found.maximum, found.max_abs, found.num_values) == (-2.0, 1.0, 2.0, 10)


def test_a_nonfinite_finding_has_the_signed_counts():
    """It is critical, and strict JSON holds it."""
    model = mlp()
    with torch.no_grad():
        model[1].weight[0, 0], model[1].weight[0, 1] = NAN, -INF
    health = audited(model)
    (finding,) = health.findings
    assert (finding.code, finding.severity, finding.names) == (
        "param_value_nonfinite",
        Severity.CRITICAL,
        ("1.weight",),
    )
    assert finding.values["1.weight"] == {"num_nan": 1, "num_posinf": 0, "num_neginf": 1, "num_values": 16}
    assert health.row("1.weight").codes == ("param_value_nonfinite",)
    assert json.loads(health.to_json())["findings"][0]["values"]["1.weight"]["num_neginf"] == 1


@pytest.mark.parametrize("dtype", [*FLOATS, *FLOATS_8[:4]], ids=str)
def test_zeros_and_subnormals_are_told_apart(dtype):
    """By the smallest normal number of the dtype itself, 8-bit ones included."""
    normal = torch.finfo(dtype).smallest_normal
    values = torch.tensor([0.0, normal, -normal, normal / 2, -normal / 2, 1.0], dtype=torch.float64)
    found = scanned(values.to(dtype))
    assert (found.num_zero, found.num_subnormal, found.num_nonfinite) == (1, 2, 0)


def test_subnormals_are_counted_where_the_processor_flushes_them():
    """They are told by their bits."""
    values = torch.tensor([1e-40, 0.0, 1.0])
    torch.set_flush_denormal(True)
    try:
        found = scanned(values)
    finally:
        torch.set_flush_denormal(False)
    assert (found.num_zero, found.num_subnormal) == (1, 1)


@pytest.mark.parametrize("dtype", FLOATS_8, ids=str)
def test_eight_bit_floats_are_audited_in_full(dtype):
    """Largest number, NaN, and a zero where the dtype has one; the use of the whole range is no warning."""
    largest = torch.finfo(dtype).max
    health = audited({"x": torch.tensor([largest, NAN, 1.0]).to(dtype)})
    found = health.row("x").scanned
    assert (found.maximum, found.num_nan, found.num_zero) == (largest, 1, 0)
    assert health.row("x").headroom_used == 1.0
    severities = {finding.code: finding.severity for finding in health.findings}
    assert severities == {
        "param_value_nonfinite": Severity.CRITICAL,
        "param_dtype_headroom": Severity.INFO,
    }


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_integers_have_exact_extremes(dtype):
    """The lowest and the highest number of each dtype, past 2**53 and 2**63 as well, and int8's -128."""
    limits = torch.iinfo(dtype)
    found = scanned(torch.tensor([limits.min, limits.max, 0, 3], dtype=dtype), bounds={"x": (0.5, 3.5)})
    assert (found.minimum, found.maximum) == (limits.min, limits.max)
    assert found.max_abs == max(abs(limits.min), limits.max)
    assert (found.num_zero, found.num_nonfinite) == (2 if limits.min == 0 else 1, 0)
    assert (found.num_below, found.num_above) == (2, 1)


def test_large_whole_numbers_are_not_rounded():
    """2**53 + 1 is no float64, and lies above a bound of 2**53."""
    found = scanned(torch.tensor([2**53 + 1, 5]), bounds={"x": (None, 2.0**53)})
    assert (found.maximum, found.num_above) == (2**53 + 1, 1)
    assert scanned(torch.tensor([2**53 + 1, 5]), bounds={"x": (None, 2**53 + 1)}).num_above == 0
    assert scanned(torch.tensor([2**64 - 1], dtype=torch.uint64), bounds={"x": (2**64, 2**70)}).num_below == 1
    assert scanned(torch.ones(2), bounds={"x": (0, 2**70)}).num_above == 0


def test_booleans_are_zeros_and_ones():
    """They have extremes and no headroom to speak of."""
    found = scanned(torch.tensor([True, False, True]))
    assert (found.minimum, found.maximum, found.num_zero) == (0, 1, 1)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
def test_both_parts_of_complex_tensors_are_values(dtype):
    """A NaN in one part is one, conjugated or not; one number throughout is two values."""
    health = audited(
        {"x": torch.tensor([1 + 2j, complex(NAN, -3)], dtype=dtype).conj(), "same": torch.full((3,), 1 + 2j)}
    )
    found = health.row("x").scanned
    assert (found.num_values, found.num_nan, found.minimum, found.maximum) == (4, 1, -2.0, 3.0)
    assert health.row("same").codes == ("param_all_same",)


def test_half_complex_is_audited_too():
    """Its parts are float16, and so is its range."""
    parts = torch.tensor([[65504.0, 1.0]], dtype=torch.float16)
    row = audited({"x": torch.view_as_complex(parts)}).row("x")
    assert (row.scanned.maximum, row.headroom_used) == (65504.0, 1.0)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("lowest", [-INF, None])
def test_a_mask_of_attention_is_information(dtype, lowest):
    """A buffer of zeros and the lowest numbers; with a NaN, with a one, or as a parameter, none."""
    mask = torch.full((4, 4), torch.finfo(dtype).min if lowest is None else lowest, dtype=dtype).triu(1)
    code = "param_dtype_headroom" if lowest is None else "param_value_nonfinite"
    model = nn.Linear(2, 2)
    model.register_buffer("mask", mask)
    (finding,) = audited(model).findings
    assert (finding.code, finding.severity, finding.names) == ("param_mask", Severity.INFO, ("mask",))
    assert finding.values["mask"]["num_neginf"] == (0 if lowest is None else 6)
    mask[0, 0] = 1.0
    assert codes(audited(model)) == [code]
    mask[0, 0] = NAN
    assert "param_value_nonfinite" in codes(audited(model))
    assert codes(audited({"mask": nn.Parameter(torch.full((4, 4), -INF).triu(1))})) == [
        "param_value_nonfinite"
    ]


def test_bounds_are_closed_and_count_both_sides():
    """A value on the bound is inside; an infinity lies beyond one; NaN is neither."""
    tensor = torch.tensor([-1.0, 0.0, 0.1, 6.0, 6.5, INF, -INF, NAN])
    found = scanned(tensor, bounds={"x": (0, 6)})
    assert (found.num_below, found.num_above) == (2, 2)
    assert scanned(torch.tensor([0.1]), bounds={"x": (None, 0.1)}).num_above == 0
    assert scanned(torch.ones(2, dtype=torch.float16), bounds={"x": (-1e30, 1e30)}).num_above == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_an_infinity_lies_beyond_a_bound_that_the_dtype_does_not_reach(dtype):
    """On either side; finite numbers lie where the bound has them."""
    tensor = torch.tensor([1.0, INF, -INF, NAN, torch.finfo(dtype).max], dtype=dtype)
    for bounds, below, above in (
        ((-1e300, 1e300), 1, 1),
        ((1e300, None), 3, 0),
        ((None, -1e300), 0, 3),
        ((None, 1e300), 0, 1),
        ((-1e300, None), 1, 0),
    ):
        found = scanned(tensor, bounds={"x": bounds})
        assert (found.num_below, found.num_above) == (below, above), bounds


def test_bounds_of_an_alias_hold():
    """A tied weight is one row; its bounds may be declared by either name."""
    model = nn.ModuleDict({"a": nn.Linear(4, 4, bias=False), "b": nn.Linear(4, 4, bias=False)})
    model["b"].weight = model["a"].weight
    health = audited(model, bounds={"b.weight": (10, None)})
    (row,) = health.rows
    assert (row.name, row.aliases, row.scanned.num_below) == ("a.weight", ("b.weight",), 16)
    assert codes(health) == ["param_bounds_violated"]
    assert audited(model, within=["b.weight"]).rows[0].name == "a.weight"


def test_views_of_the_same_entries_are_one_row():
    """A ``.data``, a flat view and a transposed one; a part of them is a row of its own."""
    weight = torch.arange(6.0).reshape(2, 3)
    state = {
        "w": nn.Parameter(weight),
        "data": weight,
        "flat": weight.view(-1),
        "t": weight.t(),
        "part": weight[0],
    }
    health = audited(state, bounds={"flat": (None, 4)})
    assert [row.name for row in health.rows] == ["w", "part"]
    assert health.row("t").aliases == ("data", "flat", "t")
    assert health.row("w").scanned.num_above == 1
    assert health.coverage["num_values"] == 9


def test_overlapping_entries_of_one_view_are_counted_as_it_shows_them():
    """An expanded tensor repeats its entries; it is not the tensor that it was made of."""
    row = torch.tensor([1.0, NAN])
    health = audited({"row": row, "expanded": row.expand(5, 2)})
    assert [one.scanned.num_nan for one in health.rows] == [1, 5]


def test_headroom_is_a_share_of_the_dtypes_range():
    """On both sides of zero; integers may fill theirs."""
    assert codes(audited({"x": torch.tensor([60_000.0, 1.0]).half()})) == ["param_dtype_headroom"]
    assert codes(audited({"x": torch.tensor([-60_000.0, 1.0]).half()})) == ["param_dtype_headroom"]
    assert codes(audited({"x": torch.tensor([50_000.0, 1.0]).half()})) == []
    assert codes(audited({"x": torch.tensor([50_000.0, 1.0]).half()}, max_fraction=0.5)) != []
    assert codes(audited({"x": torch.tensor([-128, 127], dtype=torch.int8)})) == []


def test_subnormals_are_found_from_a_share_on():
    """A tenth of all values, unless another is given."""
    tensor = torch.ones(10)
    tensor[0] = 1e-40
    assert codes(audited({"x": tensor})) == ["param_subnormal_heavy"]
    assert codes(audited({"x": tensor}, subnormal_fraction_threshold=0.2)) == []


def test_one_value_throughout_is_information():
    """Of two values and more; a single one is no fill."""
    health = audited(
        {"ones": torch.ones(3), "zeros": torch.zeros(3), "one": torch.ones(()), "nan": torch.full((3,), NAN)}
    )
    assert [row.codes for row in health.rows] == [
        ("param_all_same",),
        ("param_all_zero",),
        (),
        ("param_value_nonfinite",),
    ]


def test_tensors_without_values_say_so():
    """An empty tensor is covered, and one without finite entries has no extremes."""
    health = audited({"empty": torch.empty(0, 3), "nan": torch.full((2,), NAN)})
    empty, nan = health.rows
    assert (empty.is_scanned, empty.reason, empty.scanned.minimum) == (True, "empty", None)
    assert (nan.is_scanned, nan.reason, nan.scanned.maximum) == (True, "no_finite_entries", None)
    assert health.coverage["num_empty"] == 1
    assert health.unavailable == ()


def test_what_cannot_be_scanned_has_a_reason():
    """Meta, sparse, nested, quantised and freed tensors, and what is no tensor: none ends the audit."""
    freed = torch.ones(4)
    freed.untyped_storage().resize_(0)
    with warnings.catch_warnings():
        # Of these kinds torch itself says that they are old, or new.
        warnings.simplefilter("ignore")
        quantised = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
        csr = torch.eye(3).to_sparse_csr()
        nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    state = {
        "meta": torch.empty(3, device="meta"),
        "sparse": torch.eye(3).to_sparse(),
        "csr": csr,
        "nested": nested,
        "quantised": quantised,
        "freed": freed,
        "step": 3,
        "fine": torch.ones(2),
    }
    health = audited(state)
    reasons = {row.name: row.reason for row in health.rows if not row.is_scanned}
    assert {name: reason.partition(":")[0] for name, reason in reasons.items()} == {
        "meta": "meta_tensor",
        "sparse": "unsupported_layout",
        "csr": "unsupported_layout",
        "nested": "unsupported_layout",
        "quantised": "unsupported_dtype",
        "freed": "unsupported_layout",
        "step": "not_a_tensor",
    }
    assert health.row("fine").is_scanned
    assert (health.coverage["num_scanned"], health.coverage["num_not_scanned"]) == (1, 7)
    assert sum(entry.num_names for entry in health.unavailable) == 7
    assert "not scanned: step" in str(health)
    json.loads(health.to_json())


def test_a_class_that_answers_no_question_is_not_asked():
    """Its memory is that of a plain tensor."""
    health = audited({"x": torch.tensor([1.0, NAN]).as_subclass(Secretive), "fine": torch.ones(2)})
    assert [row.scanned.num_nan for row in health.rows] == [1, 0]
    json.loads(health.to_json())


def test_lazy_parameters_wait_for_their_shape():
    """They are listed, and the rest is audited."""
    health = audited(nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 3)))
    assert health.row("0.weight").reason == "uninitialised"
    assert health.row("1.weight").is_scanned
    json.loads(health.to_json())


def test_an_optimizers_state_is_gone_through():
    """As ``state_dict()`` nests it: tensors are rows, a list of numbers is none."""
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    health = audited(optimizer.state_dict(), bounds={"state.*.exp_avg_sq": (0, None)})
    assert health.row("state.0.exp_avg_sq").bounds == (0, None)
    assert health.row("param_groups.0.params").reason == "not_a_tensor: list"
    assert codes(health)[:1] != ["param_bounds_violated"]


def test_names_that_a_mapping_has_twice_are_two_rows():
    """A dotted key beside a nested one, a number beside its text: no tensor is lost."""
    health = audited({"a.b": torch.ones(2), "a": {"b": torch.zeros(2)}, 1: torch.tensor([NAN]), "1": 3})
    assert [row.name for row in health.rows] == ["a.b", "a.b (2)", "1", "1 (2)"]
    assert [row.codes for row in health.rows][:3] == [
        ("param_all_same",),
        ("param_all_zero",),
        ("param_value_nonfinite",),
    ]


def test_buffers_can_be_left_out():
    """Kinds are told apart."""
    model = nn.BatchNorm1d(3)
    assert {row.kind for row in audited(model).rows} == {"parameter", "buffer"}
    health = audited(model, include_buffers=False)
    assert {row.kind for row in health.rows} == {"parameter"}
    assert (health.coverage["num_parameters"], health.coverage["num_buffers"]) == (2, 0)


def test_wrappers_leave_no_segment_in_names():
    """As everywhere here."""
    assert [row.name for row in audited(torch.compile(mlp(depth=1))).rows] == ["0.weight", "0.bias"]


def test_a_large_transposed_tensor_is_read_in_pieces():
    """Counts add up over pieces, and the tensor is not copied as a whole."""
    tensor = torch.zeros(3, 1_100_000).t()
    tensor[5, 0], tensor[-1, 2], tensor[100, 1] = NAN, 7.0, -3.0
    found = scanned(tensor, bounds={"x": (-1, 1)})
    assert (found.num_nan, found.minimum, found.maximum) == (1, -3.0, 7.0)
    assert (found.num_below, found.num_above, found.num_zero) == (1, 1, 3_300_000 - 3)


def test_nothing_is_recorded_and_no_random_number_is_drawn():
    """An audit inside training leaves gradients, modes and generators as they were."""
    model = mlp()
    state = torch.get_rng_state()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        health = audited(model)
        assert torch.is_grad_enabled()
    assert torch.equal(state, torch.get_rng_state())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert health.row("0.weight").scanned.maximum == model[0].weight.max().item()


def test_checks_that_nothing_was_asked_of_did_not_run():
    """Bounds run where some were declared, and nothing runs where nothing could be scanned."""
    assert "param_bounds_violated" not in audited(mlp()).checks_run
    assert "param_bounds_violated" in audited(mlp(), bounds={"*": (-9, 9)}).checks_run
    assert audited({"x": torch.empty(2, device="meta")}).checks_run == ()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target": torch.ones(2)}, "target=Tensor has no named tensors"),
        ({"within": ["nothing"]}, "within has 'nothing'"),
        ({"bounds": {"nothing": (0, 1)}}, "bounds has 'nothing'"),
        ({"bounds": {"0.weight": (2, 1)}}, "low <= high"),
        ({"bounds": {"0.weight": (math.nan, 1)}}, "low <= high"),
        ({"bounds": {"0.weight": (0, 10**400)}}, "give a pair"),
        ({"bounds": [1]}, "give a mapping"),
        ({"bounds": {3: (0, 1)}}, "bounds has 3"),
        ({"within": ["table"], "include_buffers": False}, "within has 'table', which is left out"),
        ({"bounds": {"table": (0, 1)}, "include_buffers": False}, "bounds has 'table', which is left out"),
        ({"bounds": {"1.*": (0, 1)}, "within": ["0.*"]}, "bounds has '1.*', which is left out"),
        ({"max_fraction": 0}, "give a share"),
        ({"subnormal_fraction_threshold": 2}, "give a share"),
        ({"include_buffers": 1}, "give True or False"),
    ],
)
def test_mistakes_are_one_sentence(options, message):
    """With the value and the way out."""
    model = mlp()
    model.register_buffer("table", torch.ones(2))
    with pytest.raises(ConfigurationError, match=message):
        audited(options.pop("target", model), **options)


def test_a_row_that_is_not_there_is_one_sentence():
    """With names that are."""
    with pytest.raises(KeyError, match=r"'nope' is no parameter or buffer that was audited; .*weight"):
        param_health(nn.Linear(2, 2)).row("nope")
