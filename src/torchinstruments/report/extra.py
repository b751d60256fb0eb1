"""The packages of the extra ``report``, and the sentence that is said without them."""

from types import ModuleType
from typing import TYPE_CHECKING

from torchinstruments.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["graph_objects", "plotly_script", "require_report_extra"]


def require_report_extra() -> None:
    """Sees to it that the packages are there (offline).

    Raises:
        ConfigurationError: One of them is not installed.
    """
    try:
        import jinja2  # noqa: F401 - only whether it is there
        import plotly  # noqa: F401 - the same
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"a report needs the package {error.name}, which is not installed; run pip install plotly jinja2"
        ) from None


def graph_objects() -> ModuleType:
    """Returns ``plotly.graph_objects``.

    Raises:
        ConfigurationError: It is not installed.
    """
    require_report_extra()
    import plotly.graph_objects

    return plotly.graph_objects


def plotly_script() -> str:
    """Returns plotly's program for browsers, which the package brings along.

    Raises:
        ConfigurationError: It is not installed.
    """
    require_report_extra()
    from plotly.offline import get_plotlyjs

    load: Callable[[], str] = get_plotlyjs
    return load()
