"""The whole daemon under one seed, with faults at every seam."""
