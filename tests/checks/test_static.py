"""What the source of the hot sites may not contain."""

import ast
import inspect
import pkgutil
import textwrap
from importlib import import_module

import torchinstruments.checks as room
from torchinstruments.checks import accumulation
from torchinstruments.observe import hooks

_READS = frozenset(
    {"item", "tolist", "cpu", "numpy", "to", "get_scale", "synchronize", "float", "int", "bool"}
)


def _called(function):
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def test_the_hook_of_a_parameter_reads_no_device():
    """Nor does anything that it calls at each gradient."""
    site = accumulation.AccumulationSite
    hot = (accumulation.fire_hook, site.accumulated, site._begin, site._count, hooks.ParameterHook.__call__)
    for function in hot:
        assert _READS.isdisjoint(_called(function)), function


def test_the_only_host_reads_of_the_session_are_counted_ones():
    """`Reading.fetch` is where numbers come to the host; the timing of a scan reads too."""
    found = set()
    for module in pkgutil.iter_modules(room.__path__):
        source = inspect.getsource(import_module(f"torchinstruments.checks.{module.name}"))
        for node in ast.walk(ast.parse(source)):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr in {"item", "cpu", "numpy", "get_scale", "synchronize"}
            ):
                found.add(module.name)
    assert found <= {"reading", "overhead", "tensor_scan"}
