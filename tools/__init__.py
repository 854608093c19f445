"""Programs for developing this repository; not installed."""
