"""What an operator asks a daemon, and the few things that change one: a command for each call of AdminService."""
