"""When tensors come into being."""

from torchinstruments.merge.execution_order import ExecutionOrder
from torchinstruments.merge.nonfinite_rows import Evidence, Phase
from torchinstruments.records import ModuleRecord


def evidence(layer: str, signal: str, *, call_index: int = 0, stage: str = "") -> Evidence:
    """A tensor of a layer."""
    return Evidence(layer, call_index, signal, stage, "t", 0, "train", "synced", None, 1.0)


def modules(*names: str) -> dict[str, ModuleRecord]:
    """Layers that were called in this order."""
    return {
        name: ModuleRecord(name, "M", (), 0, 0, execution_order=place) for place, name in enumerate(names)
    }


def sorted_by(order: ExecutionOrder, phase: Phase, found: list[Evidence]) -> list[tuple[str, str, int]]:
    """Layer, signal and call of each, in order."""
    ordered = sorted(found, key=lambda one: order.key(phase, one))
    return [(one.layer, one.signal, one.call_index) for one in ordered]


def test_a_forward() -> None:
    """Parameters, then inputs as layers begin and outputs as they end; containers end last."""
    order = ExecutionOrder(modules("", "block", "block.b", "block.a", "head"))
    names = ("head", "block.a", "block", "block.b", "")
    found = [evidence(name, signal) for signal in ("output", "input") for name in names]
    found.append(evidence("head", "parameter"))
    assert sorted_by(order, Phase.FORWARD, found) == [
        ("head", "parameter", 0),
        ("", "input", 0),
        ("block", "input", 0),
        ("block.b", "input", 0),
        ("block.b", "output", 0),
        ("block.a", "input", 0),
        ("block.a", "output", 0),
        ("block", "output", 0),
        ("head", "input", 0),
        ("head", "output", 0),
        ("", "output", 0),
    ]


def test_a_backward() -> None:
    """The other way round, later calls first, a layer's output gradient before those of its parameters."""
    order = ExecutionOrder(modules("block", "block.b", "block.a"))
    found = [
        evidence("block.b", "output_gradient"),
        evidence("block.a", "parameter_gradient", stage="local_accumulated"),
        evidence("block.a", "output_gradient"),
        evidence("block.b", "output_gradient", call_index=1),
        evidence("block", "output_gradient"),
    ]
    assert sorted_by(order, Phase.BACKWARD, found) == [
        ("block", "output_gradient", 0),
        ("block.a", "output_gradient", 0),
        ("block.a", "parameter_gradient", 0),
        ("block.b", "output_gradient", 1),
        ("block.b", "output_gradient", 0),
    ]


def test_layers_without_an_order_come_last() -> None:
    """A layer that was never called, then one that no catalog lists."""
    never = {"never": ModuleRecord("never", "M", (), 0, 0)}
    order = ExecutionOrder(never | modules("fc"))
    found = [evidence(name, "output") for name in ("a stranger", "never", "fc")]
    assert [one[0] for one in sorted_by(order, Phase.FORWARD, found)] == ["fc", "never", "a stranger"]
