"""The words of the system: layouts, keys, states and errors. Touches nothing outside."""
