"""Keys rotated and, with the values, written to where they are kept."""
