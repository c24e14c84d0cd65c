"""Drop-ins for timm."""
