"""Client of the Orthros document service."""
