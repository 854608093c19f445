"""The lane: frames over a socket pair, a second way to the dispatcher beside gRPC."""
