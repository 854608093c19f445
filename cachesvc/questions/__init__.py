"""Pure reads of the ledger: what operators ask. Nothing here changes anything, waits or touches a socket."""
