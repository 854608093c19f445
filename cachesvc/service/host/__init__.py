"""The daemon's edges on its host: sockets, liveness, TLS, health, reload, the page on loopback."""
