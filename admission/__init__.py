"""The ground floor of regate: the log of a run, the rules over it, the store and the gateway."""
