"""What the collector may not call."""

import ast
from pathlib import Path

import pytest

from torchinstruments import statistics

BLAS = frozenset(
    {"dot", "vdot", "inner", "matmul", "einsum", "tensordot", "mm", "bmm", "addmm", "linalg", "norm"}
)
MODULES = sorted(Path(statistics.__file__).parent.glob("*.py"))


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_no_product_goes_through_blas(path: Path) -> None:
    """Its threads spin beside those of training long after a call has returned."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert names.isdisjoint(BLAS)
    assert not any(isinstance(node, ast.MatMult) for node in ast.walk(tree))
