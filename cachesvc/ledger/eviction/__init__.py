"""Plans of an eviction, and how its victims leave."""
