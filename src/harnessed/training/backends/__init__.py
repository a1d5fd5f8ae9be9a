"""What computes gradients: `local.py` on one machine with torch."""
