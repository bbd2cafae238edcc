"""The HTTP face of the service."""

from orthros_service.gateway.app import create_app

__all__ = ["create_app"]
