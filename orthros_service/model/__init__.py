"""The model: its files, rotary embedding, attention and transformer."""
