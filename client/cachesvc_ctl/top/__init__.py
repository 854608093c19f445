"""``cachesvc top``: a daemon at a glance, live in a terminal or once as text."""
