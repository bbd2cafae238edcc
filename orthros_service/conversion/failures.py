"""How a conversion ends early."""

from orthros_service.errors import OrthrosError


class ConversionError(OrthrosError):
    """A conversion cannot go on; what it had reached is in its last checkpoint."""

    code = "conversion_failed"
    status = 500
