"""Orthros: ingest a long document once in linear time, then ask it many times."""
