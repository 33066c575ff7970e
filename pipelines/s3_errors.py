"""What botocore and the network raise, as errors of ours that name the object and the way out."""

from __future__ import annotations

from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectTimeoutError,
    CredentialRetrievalError,
    EndpointConnectionError,
    FlexibleChecksumError,
    HTTPClientError,
    IncompleteReadError,
    NoCredentialsError,
    PartialCredentialsError,
    ProfileNotFound,
    TokenRetrievalError,
    UnauthorizedSSOTokenError,
)
from urllib3.exceptions import HTTPError

from pipelines.errors import JobError, JobRefused, NotFound

# A body that is cut off while it is read shows as an error of urllib3 or of the socket.
FOREIGN = (ClientError, BotoCoreError, HTTPError, OSError)

_CUT = (
    HTTPClientError,
    EndpointConnectionError,
    IncompleteReadError,
    FlexibleChecksumError,
    HTTPError,
    OSError,
)
_UNREACHABLE = (EndpointConnectionError, ConnectTimeoutError)
_CREDENTIALS = (
    CredentialRetrievalError,
    NoCredentialsError,
    PartialCredentialsError,
    ProfileNotFound,
    TokenRetrievalError,
    UnauthorizedSSOTokenError,
)
_LATER = {
    "RequestTimeout",
    "SlowDown",
    "Throttling",
    "ThrottlingException",
    "TooManyRequests",
    "OperationAborted",
}
_WRONG_KEYS = {"InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken", "AuthorizationHeaderMalformed"}
_WRONG_REGION = {"PermanentRedirect", "301", "IllegalLocationConstraintException"}
_EXPIRED = {"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired"}
_NOT_MADE = {501, 505}


class PreconditionFailed(JobError):
    """The object is not the one, or not the none, that a conditional request asked for."""


class Conflict(JobError):
    """Another request for the same object was under way; the whole put has to be done again."""


class UploadGone(JobError):
    """The multipart upload is not there: completed or aborted before."""


def is_transient(error: Exception) -> bool:
    """Whether the same request may go well a little later."""
    if isinstance(error, ClientError):
        status, code = _status(error), _code(error)
        return status == 429 or code in _LATER or (status >= 500 and status not in _NOT_MADE)
    # A certificate that is not trusted stays so; other trouble with TLS is a cut connection.
    return isinstance(error, _CUT) and "CERTIFICATE_VERIFY_FAILED" not in str(error)


def translated(error: Exception, act: str, uri: str, endpoint: str | None) -> JobError:
    """The error for the user; `act` is the verb of what was tried with the object at `uri`."""
    if isinstance(error, ClientError):
        return _answered(error, act, uri)
    if isinstance(error, _CREDENTIALS):
        return JobRefused(
            f"cannot {act} {uri}: no usable credentials ({error}); set AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY, storage.profile, or storage.anonymous for a public bucket"
        )
    if isinstance(error, _UNREACHABLE):
        return JobError(
            f"cannot {act} {uri}: {endpoint or 'the endpoint'} cannot be reached; check the network and "
            "storage.endpoint_url (or AWS_ENDPOINT_URL)"
        )
    kind = JobError if is_transient(error) else JobRefused
    return kind(f"cannot {act} {uri}: {' '.join(str(error).split())}")


def _answered(error: ClientError, act: str, uri: str) -> JobError:
    code, status = _code(error), _status(error)
    bucket = uri.removeprefix("s3://").partition("/")[0]
    said = f"{code}: {error.response['Error'].get('Message', 'no reason given')}"
    if code == "NoSuchBucket":
        return JobRefused(f"cannot {act} {uri}: there is no bucket {bucket}; create it or check its name")
    if code == "NoSuchUpload":
        return UploadGone(f"cannot {act} {uri}: its upload was aborted by someone else")
    if code in _EXPIRED:
        return JobError(
            f"cannot {act} {uri}: the credentials have expired ({said}); renew them and run again"
        )
    if code in _WRONG_KEYS:
        return JobRefused(f"cannot {act} {uri}: the credentials or the region are wrong ({said})")
    if code in _WRONG_REGION:
        return JobRefused(
            f"cannot {act} {uri}: bucket {bucket} is in another region; set storage.region (or AWS_REGION)"
        )
    if code == "ConditionalRequestConflict":
        return Conflict(f"cannot {act} {uri}: another writer is at it ({said})")
    if status == 412:
        return PreconditionFailed(f"cannot {act} {uri}: {said}")
    if status == 404:
        return NotFound(f"{uri} does not exist")
    if status in (401, 403):
        return JobRefused(
            f"cannot {act} {uri}: access denied ({said}); the credentials need the right to list bucket "
            f"{bucket} and to {act} its objects"
        )
    if status == 501:
        return JobRefused(f"cannot {act} {uri}: this object store does not know what is needed ({said})")
    kind = JobError if is_transient(error) else JobRefused
    return kind(f"cannot {act} {uri}: {said} (HTTP {status})")


def _code(error: ClientError) -> str:
    return str(error.response["Error"].get("Code", "unknown"))


def _status(error: ClientError) -> int:
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
