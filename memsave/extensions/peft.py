"""Drop-ins for peft."""
