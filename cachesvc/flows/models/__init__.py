"""Models: their registration, their sizes, and an operator's hand on them."""
