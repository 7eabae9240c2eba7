"""What the layer stands on: checked input, safe numbers, users' modules."""
