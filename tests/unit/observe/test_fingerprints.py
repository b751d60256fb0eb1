"""When fingerprints are taken, of what, and what becomes of those that cannot be."""

import warnings
import weakref
from collections.abc import Sequence

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

from torchinstruments.config import ErrorPolicy
from torchinstruments.observe import fingerprints
from torchinstruments.observe.faults import Faults
from torchinstruments.observe.fingerprints import Fingerprinter, Fingerprints
from torchinstruments.observe.sampling import SamplingEvent
from torchinstruments.ranks.clock import StepClock
from torchinstruments.ranks.optimizers import OptimizerWatch
from torchinstruments.records import ErrorRecord, FingerprintRecord
from torchinstruments.statistics import digests
from torchinstruments.statistics.digest_sums import HostSums
from torchinstruments.statistics.digests import Digester
from unit.observe.memory import MemorySession, observe


class Chosen:
    """Samples the forwards with the given indices."""

    def __init__(self, *indices: int) -> None:
        self.indices = indices

    def should_sample(self, event: SamplingEvent) -> bool:
        """Returns whether it is one of them."""
        return event.forward_index in self.indices


def fail(probe: str, error: BaseException) -> None:
    """Ends the test: nothing is expected to fail there."""
    raise AssertionError(probe) from error


def forget(record: ErrorRecord) -> None:
    """Keeps nothing."""


def watched(
    model: nn.Module, *, optimizer: torch.optim.Optimizer | None = None
) -> tuple[StepClock, OptimizerWatch]:
    """Returns a clock that knows of the optimizers' steps, and what tells it."""
    clock = StepClock(declared_optimizer=optimizer is not None)
    watch = OptimizerWatch(clock, weakref.ref(model), optimizer, on_error=fail)
    return clock, watch


def take(model: nn.Module) -> tuple[tuple[FingerprintRecord, ...], list[ErrorRecord]]:
    """Returns the fingerprints of a model as it is, and what was told of it."""
    told: list[ErrorRecord] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rows = Fingerprinter(Faults(ErrorPolicy.WARN, told.append)).take(model, 0).resolve()
    return rows, told


def train(model: nn.Module, optimizer: torch.optim.Optimizer, micro_batches: int = 1) -> None:
    """Makes a step."""
    for _ in range(micro_batches):
        model(torch.randn(4, 3)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def of_attempts(session: MemorySession) -> list[int]:
    """Returns the attempts that have fingerprints, each once a tensor of the model."""
    return [row.attempt for row in session.fingerprints if row.tensor == "weight"]


def test_a_row_is_what_the_parameters_were_before_the_forward():
    """A row a parameter and buffer, with the digest of its bytes when the attempt began."""
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    session = MemorySession()
    observer = observe(model, session, fingerprints=True)
    train(model, torch.optim.SGD(model.parameters(), lr=0.1))
    observer.close()

    def row(tensor: str, kind: str, *shape: int, dtype: str = "float32") -> FingerprintRecord:
        return FingerprintRecord(0, tensor, kind, "", shape, dtype, Digester().on_host(before[tensor]))

    assert session.fingerprints == [
        row("0.weight", "parameter", 2, 3),
        row("0.bias", "parameter", 2),
        row("1.weight", "parameter", 2),
        row("1.bias", "parameter", 2),
        row("1.running_mean", "buffer", 2),
        row("1.running_var", "buffer", 2),
        row("1.num_batches_tracked", "buffer", dtype="int64"),
    ]
    assert observer.counters.collection_s > 0


def test_nothing_is_fingerprinted_unless_it_is_asked_for():
    """The default is off."""
    model, session = nn.Linear(3, 2), MemorySession()
    observer = observe(model, session)
    model(torch.randn(4, 3))
    observer.close()
    assert session.fingerprints == []


def test_an_attempt_is_fingerprinted_once_at_its_first_sampled_forward():
    """Micro-batches share the parameters; attempts that are not sampled have no rows."""
    model, session = nn.Linear(3, 2), MemorySession()
    clock, watch = watched(model)
    observer = observe(
        model, session, sampler=Chosen(0, 1, 4, 5, 8), clock=clock, companions=(watch,), fingerprints=True
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(5):
        train(model, optimizer, micro_batches=2)
    observer.close()
    assert of_attempts(session) == [0, 2, 4]
    assert len({row.digest for row in session.fingerprints if row.tensor == "weight"}) == 3


def test_a_later_micro_batch_will_do_where_every_optimizer_is_watched():
    """No step came between, so another rank may have looked at an earlier one."""
    model, session = nn.Linear(3, 2), MemorySession()
    clock, watch = watched(model)
    observer = observe(model, session, sampler=Chosen(3), clock=clock, companions=(watch,), fingerprints=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        train(model, optimizer, micro_batches=2)
    observer.close()
    assert of_attempts(session) == [1]


def test_an_attempt_whose_steps_may_go_unseen_is_taken_as_it_begins_or_not_at_all():
    """Where no optimizer was seen, or one of several was named, parameters may change between forwards."""
    for named in (False, True):
        model, session = nn.Linear(3, 2), MemorySession()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        clock, watch = watched(model, optimizer=optimizer if named else None)
        companions = (watch,) if named else ()
        observer = observe(
            model, session, sampler=Chosen(1), clock=clock, companions=companions, fingerprints=True
        )
        train(model, optimizer, micro_batches=2)
        observer.close()
        assert len(session.samples()) > 0
        assert session.fingerprints == []


def test_forwards_that_come_after_a_step_or_without_gradients_are_left_alone():
    """They belong to an attempt whose parameters they no longer see, and ranks may not all evaluate."""
    model, session = nn.Linear(3, 2), MemorySession()
    clock, watch = watched(model)
    observer = observe(
        model, session, sampler=Chosen(2, 3), clock=clock, companions=(watch,), fingerprints=True
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, optimizer)
    train(model, optimizer)
    with torch.no_grad():
        model(torch.randn(4, 3))
        model(torch.randn(4, 3))
    observer.close()
    assert len(session.samples()) == 2
    assert session.fingerprints == []


def test_of_a_closure_only_the_forward_that_opens_the_attempt_counts():
    """Its further forwards see parameters that the step has moved."""
    for index, expected in ((0, [0]), (1, []), (2, [])):
        torch.manual_seed(0)
        model, session = nn.Linear(3, 2), MemorySession()
        clock, watch = watched(model)
        observer = observe(
            model, session, sampler=Chosen(index), clock=clock, companions=(watch,), fingerprints=True
        )
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)

        def closure(model: nn.Module = model, optimizer: torch.optim.Optimizer = optimizer) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(torch.ones(4, 3)).square().sum()
            loss.backward()
            return loss

        optimizer.step(closure)
        observer.close()
        assert observer.counters.forwards >= 3
        assert of_attempts(session) == expected


def test_what_has_no_bytes_to_read_is_left_out_and_told_once():
    """Sparse, meta and lazy tensors give no row, and a reason each."""
    model = nn.Sequential(nn.Linear(3, 2, device="meta"), nn.LazyLinear(2), nn.Linear(1, 1, bias=False))
    model.register_buffer("adjacency", torch.eye(2).to_sparse())
    told: list[ErrorRecord] = []
    fingerprinter = Fingerprinter(Faults(ErrorPolicy.IGNORE, told.append))
    for attempt in range(2):
        assert [row.tensor for row in fingerprinter.take(model, attempt).resolve()] == ["2.weight"]
    assert [(error.probe, error.message) for error in told] == [
        ("fingerprint", "adjacency has no fingerprint: unsupported_layout: sparse_coo"),
        ("fingerprint", "0.weight has no fingerprint: meta_tensor"),
        ("fingerprint", "0.bias has no fingerprint: meta_tensor"),
        ("fingerprint", "1.weight has no fingerprint: its shape is not known yet"),
        ("fingerprint", "1.bias has no fingerprint: its shape is not known yet"),
    ]


def test_unusual_tensors_have_fingerprints():
    """Empty, complex, float8, boolean, transposed and 0-d ones are bytes like any other."""
    model = nn.Module()
    tensors = {
        "empty": torch.empty(0, 3),
        "complex": torch.randn(3, dtype=torch.complex128),
        "float8": torch.randn(5).to(torch.float8_e4m3fn),
        "flags": torch.tensor([True, False, True]),
        "transposed": torch.randn(3, 4).t(),
        "scalar": torch.tensor(3.0),
    }
    for name, tensor in tensors.items():
        model.register_buffer(name, tensor)
    rows, told = take(model)
    assert told == []
    expected = {name: Digester().on_host(tensor) for name, tensor in tensors.items()}
    assert {row.tensor: row.digest for row in rows} == expected
    assert {row.tensor: (row.shape, row.dtype) for row in rows}["transposed"] == ((4, 3), "float32")


def test_scripted_modules_have_fingerprints():
    """Their parameters, buffers and children are in no dictionaries of Python's."""
    part = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    expected = take(nn.Sequential(nn.ReLU(), part))
    assert len(expected[0]) == 7
    assert take(nn.Sequential(nn.ReLU(), torch.jit.script(part))) == expected


def test_a_mode_in_which_the_observer_is_made_has_no_part_in_it():
    """One of fake tensors would have no number to give."""
    model = nn.Linear(3, 2)
    expected = take(model)
    with FakeTensorMode():
        assert take(model) == expected


def test_a_tensor_that_fails_costs_its_own_row_alone(monkeypatch: pytest.MonkeyPatch):
    """Out of memory in one of them, say."""
    whole = digests.Digester._on_host

    def fails_for_pairs(self: Digester, tensor: torch.Tensor, sums: HostSums) -> int:
        if tensor.shape == (2,):
            raise MemoryError("no room")
        return whole(self, tensor, sums)

    monkeypatch.setattr(digests.Digester, "_on_host", fails_for_pairs)
    rows, told = take(nn.Linear(3, 2))
    assert [row.tensor for row in rows] == ["weight"]
    assert [(error.probe, error.module, error.type) for error in told] == [
        ("fingerprint", "bias", "MemoryError")
    ]


def test_tensors_that_cannot_be_read_together_are_read_alone(monkeypatch: pytest.MonkeyPatch):
    """No memory for the copy, say: no row is lost, and nothing is told."""
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(4)))
    expected, _ = take(model)

    def fails(self: Digester, tensors: Sequence[torch.Tensor]) -> list[int]:
        raise MemoryError("no room")

    for way in ("_runs_on_host", "_rows_on_device"):
        monkeypatch.setattr(digests.Digester, way, fails)
    for host in (frozenset({"cpu"}), frozenset()):
        monkeypatch.setattr(fingerprints, "_ON_HOST", host)
        assert take(model) == (expected, [])


def test_digests_of_a_device_come_without_sign_and_in_their_places(monkeypatch: pytest.MonkeyPatch):
    """What a device holds as int64 is the number that the host would have computed."""
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(4)))
    expected, _ = take(model)

    monkeypatch.setattr(fingerprints, "_ON_HOST", frozenset())
    rows, told = take(model)
    assert told == []
    assert rows == expected
    assert any(row.digest >= 2**63 for row in rows)


def test_what_changed_in_a_model_since_the_last_fingerprints_is_seen():
    """A parameter's memory or the parameter itself exchanged, another shape, a module more or elsewhere."""
    linear = nn.Linear(3, 4)
    model = nn.Sequential(linear, nn.BatchNorm1d(4))
    fingerprinter = Fingerprinter(Faults(ErrorPolicy.RAISE, forget))

    def exchange_memory() -> None:
        linear.weight.data = torch.randn(2, 6).double()

    def exchange_parameter() -> None:
        linear.weight = nn.Parameter(torch.randn(2, 6))

    def change_in_place() -> None:
        linear.weight.data.mul_(2)

    def transpose() -> None:
        linear.weight.data = linear.weight.data.t()

    def add() -> None:
        model.insert(0, nn.Linear(1, 1))

    def remove() -> None:
        del linear.bias

    for change in (exchange_memory, exchange_parameter, change_in_place, transpose, add, remove):
        before = fingerprinter.take(model, 0).resolve()
        change()
        rows = fingerprinter.take(model, 0).resolve()
        assert rows != before
        assert {row.tensor: (row.shape, row.digest) for row in rows} == {
            name: (tensor.shape, Digester().on_host(tensor)) for name, tensor in model.state_dict().items()
        }


def test_the_model_is_left_as_it_was():
    """Gradients, modes and the state of the generator too."""
    model = nn.Linear(3, 2)
    state = torch.get_rng_state()
    with torch.autocast("cpu"):
        taken = Fingerprinter(Faults(ErrorPolicy.RAISE, forget)).take(model, 3)
        assert torch.is_autocast_enabled("cpu")
    assert torch.is_grad_enabled()
    assert torch.equal(torch.get_rng_state(), state)
    assert isinstance(taken, Fingerprints)
    assert (taken.attempt, taken.num_rows) == (3, 2)
    assert model.weight.grad is None
