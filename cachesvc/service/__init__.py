"""Who may ask, and how: the gRPC edge. A servicer converts, calls one flow, and converts back."""
