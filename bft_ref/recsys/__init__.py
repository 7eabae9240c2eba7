"""Sequential recommendation: data, models, training and metrics."""
