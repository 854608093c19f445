"""Parts that plugins of engines share, on a real daemon."""
