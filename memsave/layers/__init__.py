"""The rules, a file per family of layers: mathematics, and the drop-in modules that call it."""
