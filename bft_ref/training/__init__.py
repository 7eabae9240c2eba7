"""What training any model needs: data files, provenance, checkpoints."""
