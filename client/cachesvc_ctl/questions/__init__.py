"""Commands of an operator: questions to a daemon and the few changes of one, a command for each call of
AdminService."""
