"""Pages of a pool and arrays beside them: states, reservations, changes, counts."""
