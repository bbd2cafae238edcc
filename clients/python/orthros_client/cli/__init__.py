"""The commands that talk to a service over HTTP: ingest, ask, summarize, documents, count."""

from orthros_client.cli.app import app, main, register

__all__ = ["app", "main", "register"]
