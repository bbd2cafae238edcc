"""From an ordinary Transformer to an Orthros model: data, adapters, training, export."""
