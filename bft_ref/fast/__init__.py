"""The same numbers sooner: attention in chunks, one pass through the FFN."""
