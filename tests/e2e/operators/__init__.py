"""Output and input of operators."""
