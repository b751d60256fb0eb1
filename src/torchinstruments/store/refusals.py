"""What a filesystem client's exception means: the package's own errors, each with a sentence and a way out.

Clients raise what their libraries raise. botocore's errors are no ``OSError``, a stalled request ends in
fsspec's own timeout, S3's codes hide behind ``EINVAL`` and ``EBUSY``. This table is the one place that knows
them, by name: nothing here imports a client.
"""

import asyncio
import contextlib
import errno
from collections.abc import Generator

from torchinstruments.errors import (
    ConfigurationError,
    StorageDeniedError,
    StorageError,
    StorageNotFoundError,
    StorageUnreachableError,
    TorchInstrumentsError,
)
from torchinstruments.store.urls import scrub

__all__ = ["error_code", "explained", "is_missing_bucket", "translate"]

_NO_BUCKET = frozenset(
    {"NoSuchBucket", "InvalidBucketName", "PermanentRedirect", "BucketNotFound", "ContainerNotFound"}
)
_DENIED_CODES = frozenset(
    {
        "AuthorizationHeaderMalformed",
        "InvalidToken",
        "TokenRefreshRequired",
        "CredentialsNotSupported",
        "401",
        "403",
    }
)
_DENIED_TYPES = frozenset(
    {
        "CredentialRetrievalError",
        "DefaultCredentialsError",
        "NoAuthTokenError",
        "NoCredentialsError",
        "PartialCredentialsError",
        "ProfileNotFound",
        "RefreshError",
        "SSOError",
        "TokenRetrievalError",
        "UnauthorizedSSOTokenError",
    }
)
_CONFIGURATION_TYPES = frozenset(
    {
        "ParamValidationError",
        "InvalidRegionError",
        "UnknownServiceError",
        "InvalidConfigError",
        "ConfigParseError",
    }
)
_UNREACHABLE_ROOTS = frozenset(
    {
        "BotoCoreError",  # what is left of it: connections, proxies, endpoints, timeouts
        "ClientError",  # aiohttp's root; botocore's own class of that name carries a code and is seen before
        "FSTimeoutError",
        "HTTPClientError",
        "RequestException",
        "TransportError",
        "ServiceRequestError",
    }
)
_UNREACHABLE_NUMBERS = frozenset(
    {
        errno.EBUSY,
        errno.EREMOTEIO,
        errno.ETIMEDOUT,
        errno.ECONNRESET,
        errno.ECONNREFUSED,
        errno.ECONNABORTED,
        errno.EHOSTUNREACH,
        errno.EHOSTDOWN,
        errno.ENETUNREACH,
        errno.EPIPE,
        errno.EAGAIN,
        errno.ESTALE,
    }
)
_MAX_DETAIL_CHARACTERS = 300


def error_code(error: BaseException) -> str:
    """Returns the store's own code behind an exception, such as ``NoSuchBucket``, or ``""``."""
    seen: BaseException | None = error
    while seen is not None:
        response = getattr(seen, "response", None)
        if isinstance(response, dict):
            fault = response.get("Error")
            if isinstance(fault, dict) and fault.get("Code"):
                return str(fault["Code"])
        seen = seen.__cause__
    return ""


def is_missing_bucket(error: BaseException) -> bool:
    """Returns whether an exception says that the bucket, not the file, does not exist."""
    return error_code(error) in _NO_BUCKET


@contextlib.contextmanager
def explained(url: str, doing: str, secrets: tuple[str, ...] = ()) -> Generator[None]:
    """Raises the package's own errors in place of a client's.

    A plain ``FileNotFoundError`` and a full disk pass as they are.

    Args:
        url: Address for the message, without secrets.
        doing: What is being done, ``reading`` for example.
        secrets: Texts that the message must not hold.
    """
    try:
        yield
    except Exception as error:
        meant = translate(error, url, doing, secrets)
        if meant is error:
            raise
        # The client's own exception is left behind: its text, or its request, may hold a secret.
        raise meant from None


def translate(error: Exception, url: str, doing: str, secrets: tuple[str, ...] = ()) -> Exception:
    """Returns the exception to raise for a client's exception; the same one where it says enough."""
    if isinstance(error, TorchInstrumentsError):
        return error
    detail = scrub(_detail(error), secrets)
    ancestry = {kind.__name__ for kind in type(error).__mro__}
    if is_missing_bucket(error):
        return StorageNotFoundError(
            f"{doing} {url} failed, because its bucket does not exist or lies in another region ({detail}); "
            f"create it, or correct the URL, the endpoint or the region"
        )
    if isinstance(error, PermissionError) or error_code(error) in _DENIED_CODES or ancestry & _DENIED_TYPES:
        return StorageDeniedError(
            f"{doing} {url} was refused ({detail}); check the credentials in storage_options or the "
            f"environment, their expiry, and what they may do there"
        )
    if isinstance(error, FileNotFoundError):
        if doing == "writing":
            return StorageNotFoundError(
                f"{doing} {url} failed, because the place does not exist ({detail}); "
                f"create it, or correct the URL"
            )
        return error
    if ancestry & _CONFIGURATION_TYPES or isinstance(
        error, (TypeError, ValueError, ImportError, NotImplementedError)
    ):
        return ConfigurationError(
            f"{url} cannot be used with these storage_options ({detail}); correct them or the URL"
        )
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return error
    if (
        isinstance(error, (TimeoutError, asyncio.TimeoutError, ConnectionError, EOFError))
        or (isinstance(error, OSError) and error.errno in _UNREACHABLE_NUMBERS)
        or ancestry & _UNREACHABLE_ROOTS
    ):
        return StorageUnreachableError(f"{doing} {url} failed and may work later ({detail})")
    return StorageError(f"{doing} {url} failed ({detail})")


def _detail(error: Exception) -> str:
    text = " ".join(str(error).split())
    code = error_code(error)
    name = type(error).__name__
    if code and code not in text:
        text = f"{code}: {text}" if text else code
    return (f"{name}: {text}" if text else name)[:_MAX_DETAIL_CHARACTERS]
