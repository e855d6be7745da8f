"""Errors of the API."""

# The code for programs and the type in OpenAI's API of an error, by its HTTP status.
STATUSES = {
    400: ("invalid_value", "BadRequestError"),
    401: ("invalid_api_key", "AuthenticationError"),
    403: ("forbidden", "PermissionDeniedError"),
    404: ("not_found", "NotFoundError"),
    408: ("request_timeout", "TimeoutError"),
    413: ("request_too_large", "BadRequestError"),
    503: ("service_unavailable", "ServiceUnavailableError"),
    504: ("timeout", "TimeoutError"),
}
# The code after which Anthropic's client sends the whole conversation instead of a part of a stored one.
NO_THREADS = "thread_unsupported_request"
CLIENTS_FAULT, SERVERS_FAULT = ("invalid_request_error", "BadRequestError"), ("internal_error", "InternalServerError")


class ApiError(Exception):
    """Error in the API's form.

    Args:
        param: name of the field that is wrong.
        code: error code for programs; None: that of the status.
        retry_after: seconds; 0: unknown.

    Attributes:
        body: JSON body of the response.
    """

    def __init__(
        self, status: int, message: str, param: str | None = None, *, code: str | None = None, retry_after: int = 0
    ):
        super().__init__(message)
        self.status, self.message, self.param, self.retry_after = status, message, param, retry_after
        default, kind = STATUSES.get(status, CLIENTS_FAULT if status < 500 else SERVERS_FAULT)
        self.code = code or default
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": self.code}}


def invalid(field: str, message: str, *, code: str | None = None) -> ApiError:
    """Return the error of a field with an invalid value."""
    return ApiError(400, f"{field}: {message}", field, code=code)


def unknown_model(name: str, served: str) -> ApiError:
    """Return the error of a request for a model that is not served."""
    return ApiError(404, f"model: {name!r} is not served here; {served!r} is", "model", code="model_not_found")
