"""The gRPC services: one line a call, over the dispatcher and the questions."""
