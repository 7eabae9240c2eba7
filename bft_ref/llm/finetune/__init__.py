"""Fine-tuning of the upper layers of a Llama, plain or filtering."""
