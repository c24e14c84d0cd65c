"""Drop-ins for transformers."""
