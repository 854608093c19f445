"""The edge: transports, access and the dispatcher. A servicer converts, calls one flow, and converts back."""
