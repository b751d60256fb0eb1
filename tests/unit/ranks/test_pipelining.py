"""Which forwards a stage of a pipeline runs; the stages themselves are in tests/distributed."""

from typing import Any

import pytest
from torch.distributed.pipelining import stage

from torchinstruments.ranks.pipelining import is_pipelined, learns_shapes


def test_outside_a_stage_no_forward_is_one_of_a_pipeline() -> None:
    """Also where pipelining was imported, as here."""
    assert not is_pipelined()
    assert learns_shapes() == ""


@pytest.mark.parametrize(
    ("function", "learns"),
    [("forward_maybe_with_nosync", False), ("_forward_metadata_inference", True), ("_shape_inference", True)],
)
def test_a_function_of_the_stage_on_the_stack_tells(function: str, learns: bool) -> None:
    """By its module and its name, in this version of torch and in older ones."""
    found: list[Any] = []

    def look() -> None:
        found.extend([is_pipelined(), learns_shapes()])

    code = compile(f"def {function}(look):\n    look()\n", "stage.py", "exec")
    names: dict[str, Any] = {"__name__": stage.__name__}
    exec(code, names)
    names[function](look)
    assert found[0] is True
    assert bool(found[1]) is learns
