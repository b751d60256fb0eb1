"""Where a filesystem client takes its credentials from: the name of the place, never what it holds."""

from collections.abc import Mapping

from torchinstruments.store.deadlines import call_in_time
from torchinstruments.store.urls import schemes

__all__ = ["credentials_source"]

_TIMEOUT_S = 5.0
_EXPLICIT = (
    "key",
    "secret",
    "token",
    "account_key",
    "sas_token",
    "connection_string",
    "credential",
    "password",
)
_BOTO_METHODS = {
    "env": "environment variables (AWS_ACCESS_KEY_ID)",
    "shared-credentials-file": "the shared credentials file (~/.aws/credentials)",
    "config-file": "the configuration file (~/.aws/config)",
    "iam-role": "the role of this machine",
    "container-role": "the role of this container",
    "assume-role-with-web-identity": "a web identity (service account)",
}


def credentials_source(url: str, storage_options: Mapping[str, object] | None) -> str:
    """Returns where the credentials for an address come from, for people (offline).

    Args:
        url: A path or an fsspec URL.
        storage_options: Settings in fsspec's dialect; only the names of them are looked at, and ``profile``.

    Returns:
        A name without any secret; for a local path that it needs none.
    """
    links = schemes(url)
    if not links or set(links) <= {"file", "local", "memory"}:
        return "none needed"
    options = dict(storage_options or {})
    for link in links:
        inner = options.get(link)
        if isinstance(inner, Mapping):
            options |= {str(name): value for name, value in inner.items()}
    if options.get("anon"):
        return "none, anonymous by storage_options"
    given = [name for name in _EXPLICIT if options.get(name)]
    if given:
        return f"storage_options ({', '.join(given)})"
    if not {"s3", "s3a"} & set(links):
        return "whatever the client finds in the environment"
    profile = options.get("profile")
    return _of_boto(profile if isinstance(profile, str) else None)


def _of_boto(profile: str | None) -> str:
    from botocore.exceptions import BotoCoreError
    from botocore.session import Session

    def look() -> str:
        found = Session(profile=profile).get_credentials()
        return "" if found is None else found.method

    try:
        method = call_in_time(look, _TIMEOUT_S, what="looking for credentials")
    except TimeoutError:
        return f"not found within {_TIMEOUT_S:g} s"
    except BotoCoreError as error:
        return f"not found ({type(error).__name__})"
    return _BOTO_METHODS.get(method, method) or "none found"
